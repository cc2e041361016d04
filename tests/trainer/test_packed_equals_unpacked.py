"""The packed loss, log-probs and every gradient equal the unpacked ones, for every setting and partition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from packing_cases import (
    TOLERANCE,
    VOCABULARY,
    assert_equal_gradients,
    make_trainer,
    plain_logprobs,
    ragged_groups,
    random_group,
    tiny_llama,
    trajectory,
)
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

from headrace.errors import ModelError
from headrace.trainer import pack
from headrace.trainer.logprobs import packed_logprobs


@pytest.mark.parametrize(
    ("aggregation", "ratio", "normalize", "kl"),
    list(itertools.product(["token", "sequence"], ["behaviour", "proximal"], [True, False], [0.0, 0.05])),
)
def test_every_loss_setting(aggregation: str, ratio: str, normalize: bool, kl: float) -> None:
    module, reference = tiny_llama(0), tiny_llama(1) if kl else None
    trainer = make_trainer(
        module, reference, loss_aggregation=aggregation, ratio=ratio, normalize_std=normalize, kl_coef=kl
    )
    assert_equal_gradients(trainer, ragged_groups())


@pytest.mark.parametrize("tokens", [1, 12, 40, 100_000])
def test_every_partition_into_micro_batches(tokens: int) -> None:
    """From one sample in a row, through groups split between rows, to all groups in one row."""
    trainer = make_trainer(tiny_llama(), tokens=tokens)
    assert_equal_gradients(trainer, ragged_groups())


def test_clipping_is_active_in_these_cases() -> None:
    trainer = make_trainer(tiny_llama())
    statistics = trainer.accumulate(ragged_groups(), version=0, max_staleness=0).statistics
    assert 0.05 < statistics.clipped_ratio < 0.95


def test_truncated_samples_leave_the_loss_and_its_denominator() -> None:
    groups = ragged_groups()
    groups[0][1].finish_reason = groups[2][0].finish_reason = "length"
    trainer = make_trainer(tiny_llama(), mask_truncated=True)
    assert_equal_gradients(trainer, groups)
    result = trainer.accumulate(groups, version=0, max_staleness=0)
    assert result.tokens_masked == groups[0][1].num_sampled + groups[2][0].num_sampled
    assert result.denominator + result.tokens_masked == sum(t.num_sampled for g in groups for t in g)


@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_zero_advantage_groups_count_in_the_denominator(kl: float) -> None:
    groups = ragged_groups()
    for sample in groups[2]:
        sample.reward = 0.1
    trainer = make_trainer(tiny_llama(0), tiny_llama(1) if kl else None, kl_coef=kl)
    assert_equal_gradients(trainer, groups)
    result = trainer.accumulate(groups, version=0, max_staleness=0)
    assert result.zero_advantage_groups == 2  # with the group of one
    skipped = sum(t.num_sampled for g in (groups[2], groups[5]) for t in g)
    assert result.tokens_zero_advantage == (0 if kl else skipped)


def test_samples_of_a_group_may_differ_in_prompt_and_temperature() -> None:
    group = [
        *random_group(0, 4, [3, 6]),
        trajectory(0, 2, [7, 7], [(3, True), (4, True)], 0.9),
        trajectory(0, 3, [7, 7], [(3, True), (9, True)], 0.2, temperature=0.5),
    ]
    assert_equal_gradients(make_trainer(tiny_llama()), [group])


def test_long_responses_in_several_buckets() -> None:
    groups = [random_group(0, 6, [70, 3, 33, 16, 17, 1, 32, 64])]
    assert_equal_gradients(make_trainer(tiny_llama(), tokens=1000), groups)


def test_float32_agrees_to_its_precision() -> None:
    groups = ragged_groups()
    single, double = tiny_llama(dtype=torch.float32), tiny_llama()
    single.load_state_dict(double.state_dict())
    for module in (single, double):
        make_trainer(module).accumulate(groups, version=0, max_staleness=0)
    for (name, one), two in zip(single.named_parameters(), double.parameters(), strict=True):
        assert (one.grad.double() - two.grad).abs().max() < 1e-4 * two.grad.abs().max(), name


def test_rescoring_equals_one_sequence_at_a_time() -> None:
    module = tiny_llama()
    samples = [sample for group in ragged_groups() for sample in group]
    samples.append(trajectory(9, 0, [1, 2, 3], [], 0.0))
    samples.append(trajectory(9, 1, [1, 2, 3], [(5, True), (6, False), (7, False)], 0.0, temperature=0.0))
    packed = make_trainer(module).token_logprobs(samples)
    assert packed[-2] == []
    for sample, logprobs in zip(samples, packed, strict=True):
        assert logprobs == pytest.approx([p.item() for p in plain_logprobs(module, sample)], abs=TOLERANCE)


def test_a_response_does_not_see_another() -> None:
    """Changing one sample's tokens changes no other sample's log-probs, by not one bit."""
    module = tiny_llama()
    group = random_group(0, 5, [6, 6, 6])
    before = make_trainer(module).token_logprobs(group)
    group[1].token_ids[5:] = [(token + 1) % VOCABULARY for token in group[1].token_ids[5:]]
    after = make_trainer(module).token_logprobs(group)
    assert (before[0], before[2]) == (after[0], after[2])
    assert before[1] != after[1]


def test_the_module_keeps_its_own_attention() -> None:
    module = tiny_llama()
    module.set_attn_implementation("eager")
    make_trainer(module).token_logprobs(random_group(0, 3, [2, 2]))
    assert module.config._attn_implementation == "eager"


def test_recurrent_models_are_refused() -> None:
    module = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(ModelError, match="Mamba"):
        make_trainer(module)


def test_a_module_that_bypasses_the_attention_interface_is_refused() -> None:
    module = tiny_llama()
    (batch,) = pack([random_group(0, 3, [2])], 100)
    original = type(module.model.layers[0].self_attn).forward

    def bypass(self: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    type(module.model.layers[0].self_attn).forward = bypass
    try:
        with pytest.raises(ModelError, match="attention interface"):
            packed_logprobs(module, batch)
    finally:
        type(module.model.layers[0].self_attn).forward = original
