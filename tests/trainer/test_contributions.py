"""Steps made of several trainers' sums; sums as bytes; scope "batch"; other settings between steps."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from packing_cases import ragged_groups, random_group, tiny_llama
from torch import Tensor

from headrace.algorithms import load_algorithm
from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.errors import ConfigError, NonFiniteError, RunError
from headrace.measures import GradientResult, facts_of
from headrace.schedule import Bucket
from headrace.trainer import Exported, Trainer
from headrace.types import Trajectory

Groups = list[list[Trajectory]]


def make_trainer(dtype: torch.dtype = torch.float64, name: str = "grpo", **settings: Any) -> Trainer:
    trainer = {k: settings.pop(k) for k in list(settings) if k in TrainerConfig.model_fields}
    config = TrainerConfig(**{"learning_rate": 1e-2, "micro_batch_tokens": 48, **trainer})
    return Trainer(
        tiny_llama(dtype=dtype), load_algorithm(AlgorithmConfig(name=name, **settings)), config, 10
    )


def exported(groups: Groups, **settings: Any) -> Exported:
    trainer = make_trainer(**settings)
    trainer.accumulate(groups, version=0, max_staleness=0)
    return trainer.export()


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trainer.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("shares", [[3, 3], [1, 2, 3], [0, 6], [5, 1]])
def test_a_step_of_several_sums_is_the_step_of_one(shares: list[int], aggregation: str) -> None:
    settings = {"loss_aggregation": aggregation, "max_grad_norm": 1e9}
    groups = ragged_groups()
    whole = make_trainer(**settings)
    whole.accumulate(groups, version=0, max_staleness=0)
    parts, left = [], list(groups)
    for share in shares:
        parts.append(exported(left[:share], **settings))
        left = left[share:]
    owner = make_trainer(**settings)
    one, many = whole.step(), owner.step(parts)
    assert many.updated
    assert many.loss == pytest.approx(one.loss, abs=1e-12)
    assert many.grad_norm == pytest.approx(one.grad_norm, abs=1e-12)
    assert many.gradient.samples == one.gradient.samples
    assert many.gradient.denominator == one.gradient.denominator
    for (name, p), q in zip(owner.module.named_parameters(), whole.module.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6, name
        assert p.grad is None


def test_the_same_parts_in_the_same_order_are_the_same_bits() -> None:
    groups = ragged_groups()
    shares = (groups[:2], groups[2:3], groups[3:])
    parts = [exported(share, dtype=torch.float32) for share in shares]
    digests = []
    for order in ([0, 1, 2], [0, 1, 2], [2, 1, 0]):
        trainer = make_trainer(torch.float32)
        trainer.step([Exported.from_bytes(parts[i].to_bytes()) for i in order])
        digests.append(trainer.digest())
    assert digests[0] == digests[1]
    assert digests[0] != digests[2], "the order decides the bits"


def test_one_part_is_the_resident_sum_to_the_bit() -> None:
    resident = make_trainer(torch.float32)
    resident.accumulate(ragged_groups(), version=0, max_staleness=0)
    owner = make_trainer(torch.float32)
    assert resident.step() == owner.step([exported(ragged_groups(), dtype=torch.float32)])
    assert resident.digest() == owner.digest()


def test_exporting_leaves_nothing_and_parts_as_they_were() -> None:
    trainer = make_trainer()
    trainer.accumulate(ragged_groups(), version=0, max_staleness=0)
    taken = trainer.taken()
    assert taken
    before = gradients(trainer)
    part = trainer.export()
    assert part.gradients.keys() == before.keys()
    assert all(torch.equal(part.gradients[name], before[name]) for name in before)
    assert not trainer.taken()
    assert gradients(trainer) == {}
    assert {s.id for s in part.result.samples if s.bucket is Bucket.TRAINED} == taken
    empty = trainer.export()
    assert (empty.gradients, empty.result) == ({}, GradientResult())
    make_trainer().step([part, part])
    assert all(torch.equal(part.gradients[name], before[name]) for name in before)
    assert not trainer.step().updated


def test_bytes_are_exact_and_damage_is_refused() -> None:
    part = exported(ragged_groups())
    data = part.to_bytes()
    again = Exported.from_bytes(data)
    assert again.result == part.result
    assert again.gradients.keys() == part.gradients.keys()
    assert all(torch.equal(again.gradients[name], part.gradients[name]) for name in part.gradients)
    nothing = Exported({}, GradientResult())
    assert Exported.from_bytes(nothing.to_bytes()) == nothing
    for damaged in (data[:-1], data[:7], b"", b"x" * 64, data[:40] + b"\0" + data[41:]):
        with pytest.raises(RunError, match="a gradient contribution cannot be read"):
            Exported.from_bytes(damaged)


def test_parts_must_fit() -> None:
    part = exported(ragged_groups())
    busy = make_trainer()
    busy.accumulate(ragged_groups()[:1], version=0, max_staleness=0)
    with pytest.raises(ValueError, match="a sum of its own"):
        busy.step([part])
    other = Trainer(tiny_llama(intermediate_size=12), load_algorithm(AlgorithmConfig()), TrainerConfig(), 10)
    with pytest.raises(ValueError, match=r"gradient of .*mlp.* does not fit"):
        other.step([part])


def test_a_part_that_is_not_finite_names_what_it_was_taken_of() -> None:
    groups = ragged_groups()
    good, bad = exported(groups[:2]), exported(groups[2:])
    next(iter(bad.gradients.values())).view(-1)[0] = math.inf
    trainer = make_trainer()
    before = trainer.digest()
    with pytest.raises(NonFiniteError, match="a gradient is not finite") as caught:
        trainer.step([good, bad])
    assert {key.group for key in caught.value.trajectories} == {2, 3, 4}, "group 5 has no advantage"
    assert trainer.digest() == before
    assert gradients(trainer) == {}
    assert trainer.step([good]).updated


def test_a_step_of_parts_without_gradients_leaves_the_weights() -> None:
    equal = [random_group(0, 3, [4, 2])]
    for sample in equal[0]:
        sample.reward = 0.5
    trainer = make_trainer()
    before = trainer.digest()
    result = trainer.step([exported(equal), exported([])])
    assert not result.updated
    assert (trainer.digest(), trainer.steps) == (before, 1)
    assert result.gradient.tokens_zero_advantage == 6


def test_what_became_of_every_sample() -> None:
    groups = [random_group(i, 3, [4, 2, 5]) for i in range(3)]
    groups[1][0].finish_reason = "length"
    for sample in groups[2]:
        sample.reward = 1.0
    result = make_trainer(mask_truncated=True).accumulate(groups, version=0, max_staleness=0)
    assert [sample.id for sample in result.samples] == [t.id for group in groups for t in group]
    buckets = [sample.bucket for sample in result.samples]
    assert (
        buckets == [Bucket.TRAINED] * 3 + [Bucket.MASKED] + [Bucket.TRAINED] * 2 + [Bucket.ZERO_ADVANTAGE] * 3
    )
    assert [sample.tokens for sample in result.samples] == [4, 2, 5] * 3
    assert (result.tokens_trained, result.tokens_masked, result.tokens_zero_advantage) == (18, 4, 11)
    mean = sum(t.reward for t in groups[0]) / 3
    assert [math.copysign(1, s.advantage) for s in result.samples[:3]] == [
        math.copysign(1, t.reward - mean) for t in groups[0]
    ]
    assert all(sample.advantage == 0 for sample in result.samples[6:])


def facts_by_group(groups: Groups) -> dict[int, Any]:
    return {group[0].id.group: facts_of(group) for group in groups}


@pytest.mark.parametrize("pieces", [[6], [1, 5], [1] * 6])
def test_advantages_of_the_batch_do_not_depend_on_the_pieces(pieces: list[int]) -> None:
    groups = ragged_groups()
    trainer = make_trainer(name="reinforce")
    batch, left = facts_by_group(groups), list(groups)
    total = GradientResult()
    for piece in pieces:
        total.merge(trainer.accumulate(left[:piece], version=0, max_staleness=0, batch=batch))
        left = left[piece:]
    rewards = [t.reward for g in groups for t in g]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) + 1e-4
    assert [s.advantage for s in total.samples] == pytest.approx([(r - mean) / std for r in rewards])
    assert total.zero_advantage_groups == 0, "the group of one has an advantage too"
    one = make_trainer(name="reinforce")
    one.accumulate(groups, version=0, max_staleness=0, batch=batch)
    for name, gradient in gradients(one).items():
        assert (gradient - gradients(trainer)[name]).abs().max() < 1e-9, name


def test_advantages_of_the_batch_need_its_facts() -> None:
    groups = ragged_groups()
    batch = facts_by_group(groups)
    others = facts_by_group(groups[1:])
    changed = batch | {0: list(reversed(batch[0]))}
    trainer = make_trainer(name="reinforce")
    for wrong in (None, others, changed):
        with pytest.raises(ValueError, match="needs the facts"):
            trainer.accumulate(groups[:1], version=0, max_staleness=0, batch=wrong)
    assert gradients(trainer) == {}
    growing = facts_by_group(groups[:3])
    trainer.accumulate(groups[:1], version=0, max_staleness=0, batch=growing)
    with pytest.raises(ValueError, match="another one than when the step's first gradient"):
        trainer.accumulate(groups[1:2], version=0, max_staleness=0, batch=batch)


def test_other_settings_hold_from_the_next_step_and_moments_stay() -> None:
    first, second = ragged_groups()[:3], ragged_groups()[3:]
    changed = TrainerConfig(
        learning_rate=5e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, micro_batch_tokens=200
    )
    trainer = make_trainer()
    trainer.accumulate(first, version=0, max_staleness=0)
    trainer.step()
    state, module = copy.deepcopy(trainer.state_dict()), copy.deepcopy(trainer.module)
    trainer.configure(load_algorithm(AlgorithmConfig(clip_low=0.1)), changed, 20)
    fresh = Trainer(module, load_algorithm(AlgorithmConfig(clip_low=0.1)), changed, 20)
    fresh.load_state_dict(state)
    results = []
    for each in (trainer, fresh):
        each.accumulate(second, version=0, max_staleness=0)
        results.append(each.step())
    assert results[0] == results[1]
    assert results[0].learning_rate == 5e-3
    assert trainer.digest() == fresh.digest()


def test_the_loss_cannot_change_within_a_step() -> None:
    trainer = make_trainer()
    trainer.accumulate(ragged_groups()[:1], version=0, max_staleness=0)
    trainer.configure(load_algorithm(AlgorithmConfig()), TrainerConfig(learning_rate=1e-4), 10)
    with pytest.raises(RunError, match="cannot change within a step"):
        trainer.configure(load_algorithm(AlgorithmConfig(clip_low=0.1)), TrainerConfig(), 10)
    with pytest.raises(ConfigError, match="kl_coef"):
        trainer.configure(load_algorithm(AlgorithmConfig(kl_coef=0.1)), TrainerConfig(), 10)
    assert trainer.step().learning_rate == 1e-4


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "cispo", "icepop", "dsis"])
def test_no_algorithms_gradient_depends_on_the_partition(name: str) -> None:
    """Split trajectories too: their rows may stand in different micro-batches."""
    rng = random.Random(0)
    groups = ragged_groups()
    for group in groups[:3]:
        sample = group[0]
        sample.split([rng.randrange(60) for _ in range(4)], "thinking was left out")
        for _ in range(5):
            sample.append_sampled(rng.randrange(60), -rng.uniform(2, 6), 0)
    sums = []
    for tokens, pieces in ((1, 1), (48, 2), (10_000, 6)):
        trainer = make_trainer(name=name, micro_batch_tokens=tokens)
        for i in range(0, len(groups), pieces):
            trainer.accumulate(groups[i : i + pieces], version=0, max_staleness=0)
        sums.append(gradients(trainer))
    assert max(gradient.abs().max() for gradient in sums[0].values()) > 1e-3
    for other in sums[1:]:
        for parameter, gradient in sums[0].items():
            assert (gradient - other[parameter]).abs().max() < 1e-9, parameter


@pytest.mark.parametrize("size", [30.0, 89.0, 1000.0])
def test_extreme_ratios_are_counted_and_leave_the_gradient_finite(size: float) -> None:
    group = random_group(0, 3, [4, 4])
    group[0].logprobs[5] -= size
    group[1].logprobs[4] -= size
    trainer = make_trainer(torch.float32)
    statistics = trainer.accumulate([group], version=0, max_staleness=0).statistics
    assert statistics.clamped_ratio == 2 / 8
    assert trainer.step().updated
