"""Steps: streaming, staleness, the optimizer, schedules, non-finite values, resume."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from packing_cases import plain_loss, ragged_groups, random_group, tiny_llama
from torch import Tensor, nn

from headrace.algorithms import effective_sample_size, load_algorithm, policy_kl
from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.errors import ConfigError, NonFiniteError, RunError, UserError
from headrace.trainer import Trainer
from headrace.trainer.optimizer import learning_rate_at
from headrace.types import Trajectory


def make_trainer(module: nn.Module | None = None, total_steps: int = 10, **settings: Any) -> Trainer:
    algorithm = {k: settings.pop(k) for k in list(settings) if k in AlgorithmConfig.model_fields}
    config = TrainerConfig(**{"learning_rate": 1e-2, "micro_batch_tokens": 48, **settings})
    chosen = load_algorithm(AlgorithmConfig(**algorithm))
    return Trainer(module or tiny_llama(), chosen, config, total_steps)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.module.named_parameters()}


def batch_at(step: int) -> list[list[Trajectory]]:
    return [random_group(10 * step + i, 3 + i, [4, 2, 6]) for i in range(2)]


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("pieces", [[1, 5], [2, 2, 2], [1] * 6])
def test_any_partition_streams_to_the_same_step(pieces: list[int], aggregation: str) -> None:
    groups = ragged_groups()
    whole = make_trainer(loss_aggregation=aggregation, max_grad_norm=1e9)
    whole.accumulate(groups, version=0, max_staleness=0)
    streamed = make_trainer(loss_aggregation=aggregation, max_grad_norm=1e9)
    left = list(groups)
    for piece in pieces:
        streamed.accumulate(left[:piece], version=0, max_staleness=0)
        left = left[piece:]
    one, two = whole.step(), streamed.step()
    assert two.loss == pytest.approx(one.loss, abs=1e-12)
    assert two.grad_norm == pytest.approx(one.grad_norm, abs=1e-12)
    assert one.gradient.denominator == two.gradient.denominator
    for name, weight in weights(whole).items():
        # AdamW divides by the root of the second moment, which magnifies rounding of tiny gradients.
        assert (weight - weights(streamed)[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("max_norm", [1e-3, 1e9])
def test_a_step_is_adamw_on_the_clipped_mean_gradient(max_norm: float) -> None:
    groups = ragged_groups()
    trainer = make_trainer(max_grad_norm=max_norm, weight_decay=0.1)
    plain = copy.deepcopy(trainer.module)
    loss = plain_loss(plain, groups, trainer.algorithm.settings)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    optimizer.step()
    trainer.accumulate(groups, version=0, max_staleness=0)
    result = trainer.step()
    assert result.updated
    assert result.learning_rate == 1e-2
    assert result.loss == pytest.approx(loss.item(), abs=1e-9)
    assert result.grad_norm == pytest.approx(norm.item(), abs=1e-9)
    for (name, p), q in zip(trainer.module.named_parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6, name
        assert p.grad is None


def test_the_reward_rises() -> None:
    """Rewarding one answer makes it likelier."""
    trainer = make_trainer()
    group = random_group(0, 3, [4, 4, 4])
    for sample in group:
        sample.reward = float(sample.id.sample == 1)
    before = [sum(logprobs) for logprobs in trainer.token_logprobs(group)]
    for version in range(3):
        for sample, logprobs in zip(group, trainer.token_logprobs(group), strict=True):
            sample.logprobs[3:], sample.versions[3:] = logprobs, [version] * 4
        trainer.accumulate([group], version=version, max_staleness=0)
        trainer.step()
    after = [sum(logprobs) for logprobs in trainer.token_logprobs(group)]
    assert after[1] > before[1] + 1
    assert after[0] < before[0]


def test_a_step_without_any_advantage_leaves_weights_and_moments() -> None:
    trainer = make_trainer(weight_decay=0.1)
    groups = ragged_groups()
    for group in groups:
        for sample in group:
            sample.reward = 0.3
    before = weights(trainer)
    gradient = trainer.accumulate(groups, version=0, max_staleness=0)
    result = trainer.step()
    assert not result.updated
    assert (result.grad_norm, result.loss) == (0, 0)
    assert (
        gradient.tokens_zero_advantage
        == gradient.denominator
        == sum(t.num_sampled for g in groups for t in g)
    )
    assert gradient.micro_batches == 0
    assert trainer.steps == 1
    assert equal(weights(trainer), before)
    assert trainer.state_dict()["moments"] == {}


def test_an_empty_step_is_a_step() -> None:
    trainer = make_trainer()
    trainer.accumulate([[]], version=0, max_staleness=0)
    assert not trainer.step().updated


@pytest.mark.parametrize(
    ("version", "bound", "allowed"), [(4, 2, True), (5, 2, False), (1, 9, False), (2, 0, True)]
)
def test_the_staleness_bound_is_asserted(version: int, bound: int, allowed: bool) -> None:
    trainer = make_trainer()
    group = random_group(0, 3, [3, 3], version=2)
    if allowed:
        statistics = trainer.accumulate([group], version=version, max_staleness=bound).statistics
        assert (statistics.staleness_max, statistics.staleness_mean) == (version - 2, version - 2)
        return
    with pytest.raises(RunError, match=r"trajectory 0\.0\.0 has a token of version 2"):
        trainer.accumulate(
            [random_group(1, 3, [3, 3], version=version), group], version=version, max_staleness=bound
        )
    assert all(p.grad is None for p in trainer.module.parameters())
    assert not trainer.step().updated


def poison(module: nn.Module, token: int) -> None:
    """Make the logits NaN at every position that holds `token`."""
    with torch.no_grad():
        module.model.embed_tokens.weight[token] = math.nan


def clean_groups(forbidden: int) -> list[list[Trajectory]]:
    groups = ragged_groups()
    for group in groups:
        for sample in group:
            sample.token_ids = [t if t != forbidden else (t + 1) for t in sample.token_ids]
    return groups


def test_a_non_finite_loss_names_its_trajectories_and_changes_nothing() -> None:
    trainer = make_trainer(tiny_llama(tie_word_embeddings=False))
    groups = clean_groups(7)
    poison(trainer.module, 7)
    groups[2][3].token_ids[12] = 7
    before = weights(trainer)
    with pytest.raises(
        NonFiniteError, match=r"step 1: a loss is not finite \(trajectories 2\.3\.0\)"
    ) as caught:
        trainer.accumulate(groups, version=0, max_staleness=0)
    assert caught.value.trajectories == (groups[2][3].id,)
    assert all(p.grad is None for p in trainer.module.parameters())
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(before.values(), weights(trainer).values(), strict=True)
    )
    assert not trainer.step().updated
    assert trainer.accumulate(groups[:2], version=0, max_staleness=0).micro_batches


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_a_non_finite_reward_names_its_trajectory(reward: float | None) -> None:
    groups = ragged_groups()
    groups[1][2].reward = reward
    with pytest.raises(NonFiniteError, match="reward") as caught:
        make_trainer().accumulate(groups, version=0, max_staleness=0)
    assert caught.value.trajectories == (groups[1][2].id,)


def test_a_non_finite_behaviour_logprob_names_its_trajectory() -> None:
    groups = ragged_groups()
    groups[0][2].logprobs[6] = -math.inf
    with pytest.raises(NonFiniteError) as caught:
        make_trainer().accumulate(groups, version=0, max_staleness=0)
    assert caught.value.trajectories == (groups[0][2].id,)


def test_a_non_finite_gradient_names_its_trajectories_and_changes_nothing() -> None:
    trainer = make_trainer()
    groups = clean_groups(7)
    groups[2][1].token_ids[9] = groups[4][0].token_ids[4] = 7

    def spoil(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        """Only the backward through token 7 is spoilt: the loss stays finite."""
        if output.requires_grad:
            mask = (inputs[0] == 7)[..., None]
            output.register_hook(lambda gradient: torch.where(mask, gradient * math.inf, gradient))

    trainer.module.model.embed_tokens.register_forward_hook(spoil)
    before = weights(trainer)
    trainer.accumulate(groups, version=0, max_staleness=0)
    with pytest.raises(NonFiniteError, match="a gradient is not finite") as caught:
        trainer.step()
    assert set(caught.value.trajectories) == {groups[2][1].id, groups[4][0].id}
    assert equal(weights(trainer), before)
    assert all(p.grad is None for p in trainer.module.parameters())
    assert trainer.steps == 0


def test_an_error_half_way_discards_the_step() -> None:
    trainer = make_trainer()
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    trainer.module.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.accumulate(ragged_groups(), version=0, max_staleness=0)
    assert not trainer.step().updated


def test_statistics_are_those_of_the_tokens() -> None:
    trainer = make_trainer()
    fresh, stale, mixed = (random_group(i, 4, [3, 5], version=v) for i, v in ((0, 3), (1, 2), (2, 3)))
    for sample in mixed:
        sample.mixed_kv = True
    samples = [*fresh, *stale, *mixed]
    behaviour = [[lp for lp, s in zip(t.logprobs, t.sampled, strict=True) if s] for t in samples]
    current = trainer.token_logprobs(samples)
    one = trainer.accumulate([fresh], version=3, max_staleness=1)
    one.merge(trainer.accumulate([stale, mixed], version=3, max_staleness=1))
    statistics = one.statistics
    flat_new = torch.tensor([x for xs in current for x in xs], dtype=torch.float64)
    flat_mu = torch.tensor([x for xs in behaviour for x in xs], dtype=torch.float64)
    fresh_difference = (flat_new - flat_mu)[:8].abs()
    assert statistics.drift.tokens == statistics.aged == 24
    assert statistics.drift.ess == pytest.approx(effective_sample_size(flat_new, flat_mu).item())
    assert statistics.drift.kl == pytest.approx(policy_kl(flat_new, flat_mu).item())
    mismatch = statistics.mismatch
    assert mismatch.tokens == 8, "neither stale tokens nor those over old KV count"
    assert mismatch.difference_mean == pytest.approx(fresh_difference.mean().item())
    assert mismatch.difference_max == pytest.approx(fresh_difference.max().item())
    assert mismatch.ess == pytest.approx(effective_sample_size(flat_new[:8], flat_mu[:8]).item())
    assert mismatch.kl == pytest.approx(policy_kl(flat_new[:8], flat_mu[:8]).item())
    assert (statistics.staleness_mean, statistics.staleness_max) == (pytest.approx(8 / 24), 1)
    assert one.tokens_trained == one.denominator == 24
    pending = trainer.step().gradient
    assert (pending.tokens_trained, pending.statistics.mismatch.tokens) == (24, 8)


def test_on_policy_there_is_no_difference() -> None:
    trainer = make_trainer()
    groups = ragged_groups()
    flat = [t for g in groups for t in g]
    for sample, logprobs in zip(flat, trainer.token_logprobs(flat), strict=True):
        values = iter(logprobs)
        sample.logprobs = [next(values) if s else 0.0 for s in sample.sampled]
    statistics = trainer.accumulate(groups, version=0, max_staleness=0).statistics
    assert statistics.mismatch.difference_max < 1e-12
    assert statistics.mismatch.ess == pytest.approx(1)
    assert statistics.clipped == 0


def test_learning_rates() -> None:
    def rates(**settings: Any) -> list[float]:
        config = TrainerConfig(learning_rate=1.0, **settings)
        return [learning_rate_at(config, step, 8) for step in range(9)]

    assert rates() == [1.0] * 9
    assert rates(warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 6)
    assert rates(schedule="linear", warmup_steps=4) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1, 0.75, 0.5, 0.25, 0]
    )
    cosine = rates(schedule="cosine")
    assert cosine == pytest.approx([(1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)])


def test_a_step_has_its_learning_rate() -> None:
    trainer = make_trainer(warmup_steps=1, schedule="linear", total_steps=3)
    seen = []
    before = weights(trainer)
    for step in range(3):
        trainer.accumulate(batch_at(step), version=0, max_staleness=0)
        seen.append(trainer.step().learning_rate)
        if step == 0:  # AdamW's first step moves every weight by the rate, up to its ε
            after = weights(trainer)
            assert max((after[n] - before[n]).abs().max().item() for n in after) == pytest.approx(
                5e-3, rel=1e-3
            )
    assert seen == pytest.approx([5e-3, 1e-2, 5e-3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resuming_the_optimizer_is_bitwise(dtype: torch.dtype) -> None:
    settings = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01}
    straight = make_trainer(tiny_llama(dtype=dtype), **settings)
    for step in range(3):
        straight.accumulate(batch_at(step), version=0, max_staleness=0)
        straight.step()
    state = copy.deepcopy(straight.state_dict())
    resumed = make_trainer(copy.deepcopy(straight.module), **settings)
    resumed.load_state_dict(state)
    for trainer in (straight, resumed):
        for step in range(3, 6):
            trainer.accumulate(batch_at(step), version=0, max_staleness=0)
            trainer.step()
    assert equal(weights(straight), weights(resumed))
    assert equal(straight.state_dict()["moments"], resumed.state_dict()["moments"])
    assert resumed.steps == 6
    assert not equal(state["moments"], straight.state_dict()["moments"])  # it was copied, not shared


def test_another_models_optimizer_state_is_refused() -> None:
    trainer = make_trainer()
    trainer.accumulate(batch_at(0), version=0, max_staleness=0)
    trainer.step()
    state = trainer.state_dict()
    with pytest.raises(UserError, match="does not fit the model"):
        make_trainer(tiny_llama(intermediate_size=12)).load_state_dict(state)
    with pytest.raises(UserError, match="which the model lacks"):
        make_trainer(tiny_llama(num_hidden_layers=1)).load_state_dict(state)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match="kl_coef"):
        make_trainer(kl_coef=0.1)
