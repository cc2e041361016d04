"""The packed loss, log-probs and every gradient equal the unpacked ones, for every setting and attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from packing_cases import (
    VOCABULARY,
    exact_norms,
    plain_logprobs,
    plain_loss,
    ragged_groups,
    random_group,
    tiny_llama,
    trajectory,
)
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.errors import ModelError
from headrace.trainer import Trainer, pack
from headrace.trainer.logprobs import packed_logprobs
from headrace.types import Trajectory

TOLERANCE = 1e-9
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_trainer(
    module: nn.Module, reference: nn.Module | None = None, tokens: int = 64, **settings: Any
) -> Trainer:
    config = AlgorithmConfig(**settings)
    return Trainer(module, config, TrainerConfig(micro_batch_tokens=tokens), 10, reference)


def assert_equal_gradients(
    trainer: Trainer, groups: list[list[Trajectory]], implementation: str = "sdpa"
) -> None:
    module = trainer.module
    result = trainer.accumulate(groups, version=0, max_staleness=0)
    packed = {
        name: p.grad / result.denominator for name, p in module.named_parameters() if p.grad is not None
    }
    module.zero_grad()
    loss = plain_loss(module, groups, trainer.config, trainer.reference, implementation)
    loss.backward()
    unpacked = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert packed.keys() == unpacked.keys()
    assert result.loss_sum / result.denominator == pytest.approx(loss.item(), abs=TOLERANCE)
    assert max(gradient.abs().max().item() for gradient in unpacked.values()) > 1e-3
    for name, gradient in unpacked.items():
        assert (packed[name] - gradient).abs().max() < TOLERANCE, name
    module.zero_grad()


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


def mistral() -> nn.Module:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)).double().eval()


def gemma2() -> nn.Module:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES,
        sliding_window=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=7,
    )
    return Gemma2ForCausalLM(config).double().eval()


def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=3, experts_implementation="eager"
    )
    module = GptOssForCausalLM(config).double().eval()
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.sinks.copy_(torch.randn(4))
    return module


@pytest.mark.parametrize("make", [mistral, gemma2, gpt_oss])
def test_sliding_windows_soft_caps_and_sinks(make: Any) -> None:
    """Against dense attention in float64; transformers' own takes its softmax in float32."""
    module = exact_norms(make())
    assert_equal_gradients(make_trainer(module), ragged_groups(), implementation="plain_for_tests")


@pytest.mark.parametrize("make", [mistral, gemma2, gpt_oss])
def test_they_mean_what_transformers_means_by_them(make: Any) -> None:
    """1e-5: transformers' eager attention rounds its weights to float32."""
    module = make()
    samples = [sample for group in ragged_groups() for sample in group]
    packed = make_trainer(module).token_logprobs(samples)
    with torch.no_grad():
        for sample, logprobs in zip(samples, packed, strict=True):
            eager = [logp.item() for logp in plain_logprobs(module, sample, "eager")]
            assert logprobs == pytest.approx(eager, abs=1e-5)


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
