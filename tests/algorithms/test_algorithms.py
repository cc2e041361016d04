"""Every algorithm's loss and gradient against its formula, written out one token at a time; clamps; identities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.algorithms import BUILT_IN, Algorithm, SampleFacts, Tokens, clipped_surrogate, load_algorithm
from headrace.config import AlgorithmConfig
from headrace.presets import PRESETS

L_MAX = 16
LOGPROB = st.floats(-6, -0.01)
SEQUENCE = st.tuples(st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB), min_size=1, max_size=5), st.floats(-3, 3))
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=4)
"""Per sequence its tokens' log-probs under π, μ and the reference, and its advantage."""

Plain = Callable[[list[Tensor], list[float], float], list[Tensor]]
"""From a sequence's log-probs under π (scalars with a gradient) and μ, and its advantage, to its tokens' losses."""


class Case(NamedTuple):
    name: str
    plain: Plain
    divisor: Callable[[list[int]], float]
    """What the sum is divided by, given the sequences' lengths."""
    per_sequence: bool = False
    """Whether each sequence's sum is divided by its own length first."""
    settings: dict[str, Any] | None = None


def make(name: str, **settings: Any) -> Algorithm:
    if name == "dr_grpo":
        settings = {"max_length": L_MAX, **settings}
    return load_algorithm(AlgorithmConfig(name=name, **settings))


def clip(value: Tensor, low: float, high: float) -> Tensor:
    bound = torch.tensor(min(max(value.item(), low), high), dtype=torch.float64)
    return value if low <= value.item() <= high else bound


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return a if a.item() < b.item() else b


def ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -smaller(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def plain_behaviour(low: float, high: float) -> Plain:
    return lambda logp, mu, a: [ppo((p - m).exp(), a, low, high) for p, m in zip(logp, mu, strict=True)]


def plain_proximal(logp: list[Tensor], mu: list[float], advantage: float) -> list[Tensor]:
    # r = π / sg(π) is 1 and has the gradient of log π.
    return [
        -min(math.exp(p.item() - m), 2.0) * advantage * (p - p.item()).exp()
        for p, m in zip(logp, mu, strict=True)
    ]


def plain_reinforce(cap: float) -> Plain:
    return lambda logp, mu, a: [
        -min(math.exp(p.item() - m), cap) * a * p for p, m in zip(logp, mu, strict=True)
    ]


def plain_gspo(low: float, high: float) -> Plain:
    def losses(logp: list[Tensor], mu: list[float], advantage: float) -> list[Tensor]:
        mean = sum(p - m for p, m in zip(logp, mu, strict=True)) / len(logp)
        return [ppo(mean.exp(), advantage, low, high)] * len(logp)

    return losses


def plain_icepop(logp: list[Tensor], mu: list[float], advantage: float) -> list[Tensor]:
    losses = []
    for p, m in zip(logp, mu, strict=True):
        rho = math.exp(p.item() - m)
        losses.append(-(rho if 0.5 <= rho <= 2 else 0.0) * advantage * (p - p.item()).exp())
    return losses


def plain_dsis(logp: list[Tensor], mu: list[float], advantage: float) -> list[Tensor]:
    losses = []
    for p, m in zip(logp, mu, strict=True):
        r = math.exp(p.item() - m)
        losses.append(-(r if 0.8 < r < 1.28 else 0.0) * advantage * p)
    return losses


TOKENS = sum
SEQUENCES_ONLY = len
CASES = [
    Case("grpo", plain_behaviour(0.2, 0.28), TOKENS),
    Case("grpo", plain_proximal, TOKENS, settings={"ratio": "proximal"}),
    Case("grpo", plain_behaviour(0.2, 0.28), len, True, {"loss_aggregation": "sequence"}),
    Case("dr_grpo", plain_behaviour(0.2, 0.2), lambda lengths: len(lengths) * L_MAX),
    Case("dapo", plain_behaviour(0.2, 0.28), TOKENS),
    Case("gspo", plain_gspo(3e-4, 4e-4), len, True),
    Case("gspo", plain_gspo(0.2, 0.3), len, True, {"clip_low": 0.2, "clip_high": 0.3}),
    Case("rloo", plain_reinforce(2.0), TOKENS),
    Case("reinforce", plain_reinforce(2.0), TOKENS),
    Case("cispo", plain_reinforce(5.0), TOKENS),
    Case("cispo", plain_reinforce(1.28), TOKENS, settings={"clip_high": 0.28}),
    Case("icepop", plain_icepop, len, True),
    Case("dsis", plain_dsis, TOKENS),
]


def tokens_of(sequences: Sequence[tuple[list[tuple[float, float, float]], float]]) -> Tokens:
    """All sequences as one micro-batch, in float64."""
    rows = [(*token, a, len(tokens), i) for i, (tokens, a) in enumerate(sequences) for token in tokens]
    logp, mu, ref, advantages, lengths, owners = zip(*rows, strict=True)
    double = {"logp": logp, "logp_behaviour": mu, "advantages": advantages, "logp_ref": ref}
    columns = {name: torch.tensor(column, dtype=torch.float64) for name, column in double.items()}
    columns["logp"].requires_grad_()
    return Tokens(lengths=torch.tensor(lengths), sequences=torch.tensor(owners), **columns)


def batch_loss(algorithm: Algorithm, tokens: Tokens) -> tuple[float, Tensor]:
    """The batch's loss and its gradient by log-prob."""
    lengths = [int(tokens.lengths[tokens.sequences == i][0]) for i in range(int(tokens.sequences.max()) + 1)]
    losses = algorithm.token_losses(tokens).loss
    loss = algorithm.loss_sum(losses, tokens.lengths) / algorithm.denominator(lengths)
    (gradient,) = torch.autograd.grad(loss, tokens.logp)
    return loss.item(), gradient


@pytest.mark.parametrize("kl", [0.0, 0.04])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.settings or ''}")
@given(sequences=SEQUENCES)
def test_loss_and_gradient_are_the_formula(
    case: Case, kl: float, sequences: list[tuple[list[tuple[float, float, float]], float]]
) -> None:
    found, gradient = batch_loss(make(case.name, kl_coef=kl, **(case.settings or {})), tokens_of(sequences))
    leaves, total = [], torch.zeros((), dtype=torch.float64)
    for tokens, advantage in sequences:
        logp = [torch.tensor(p, dtype=torch.float64, requires_grad=True) for p, _, _ in tokens]
        losses = case.plain(logp, [m for _, m, _ in tokens], advantage)
        for t, (_, _, ref) in enumerate(tokens):
            losses[t] = losses[t] + kl * ((ref - logp[t]).exp() - (ref - logp[t]) - 1)
        total = total + sum(losses) / (len(tokens) if case.per_sequence else 1)
        leaves += logp
    expected = total / case.divisor([len(tokens) for tokens, _ in sequences])
    grads = torch.autograd.grad(expected, leaves, allow_unused=True)
    assert found == pytest.approx(expected.item(), abs=1e-10)
    # A ratio exactly at a bound has a gradient on either side.
    assert gradient.tolist() == pytest.approx([0.0 if g is None else g.item() for g in grads], abs=1e-10)


def test_every_built_in_algorithm_is_in_these_cases() -> None:
    assert {case.name for case in CASES} == set(BUILT_IN) == set(PRESETS)


ON_POLICY = [([(-0.5, -0.5, 0.0), (-2.0, -2.0, 0.0)], 1.5), ([(-1.0, -1.0, 0.0)] * 3, -0.7)]


def on_policy(name: str, **settings: Any) -> Tensor:
    return batch_loss(make(name, **settings), tokens_of(ON_POLICY))[1]


def test_on_policy_identities() -> None:
    """With r = 1 everywhere, for the same advantages (ALGORITHMS of the papers agree)."""
    close = {"atol": 1e-15, "rtol": 1e-12}
    dapo = on_policy("dapo")
    for name in ("cispo", "grpo", "rloo", "reinforce", "dsis"):
        assert torch.allclose(on_policy(name), dapo, **close), name
    grpo = on_policy("grpo", loss_aggregation="sequence")
    for name in ("gspo", "icepop"):
        assert torch.allclose(on_policy(name), grpo, **close), name
    assert not torch.allclose(grpo, dapo, **close)
    assert torch.allclose(on_policy("dr_grpo"), dapo * 5 / (2 * L_MAX), **close)


def test_on_policy_nothing_is_clipped() -> None:
    for name in BUILT_IN:
        assert not make(name).token_losses(tokens_of(ON_POLICY)).clipped.any(), name


@pytest.mark.parametrize(
    ("name", "clipped"),
    [
        ("grpo", [False, True, False, True]),  # by the sign of the advantage
        ("cispo", [False, False, False, True]),
        ("rloo", [False, False, False, True]),
        ("icepop", [True, False, False, True]),
        ("dsis", [True, True, False, True]),
    ],
)
def test_what_counts_as_clipped(name: str, clipped: list[bool]) -> None:
    """Ratios 0.1 with A > 0; 0.7 with A < 0; 1.1 and 9 with A > 0."""
    ratios = [(0.1, 1.0), (0.7, -1.0), (1.1, 1.0), (9.0, 1.0)]
    sequences = [([(-3.0, -3.0 - math.log(r), 0.0)], a) for r, a in ratios]
    assert make(name).token_losses(tokens_of(sequences)).clipped.tolist() == clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [21.0, 89.0, 1000.0])
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
def test_huge_log_ratios_leave_everything_finite(
    name: str, size: float, dtype: torch.dtype, ratio: str
) -> None:
    settings = {"ratio": ratio} if "ratio" in PRESETS[name] else {}
    logp = torch.tensor([-0.5, -0.5 - size, -0.5, -0.5 - size, -0.5], dtype=dtype)
    mu = torch.tensor([-0.5 - size, -0.5, -0.5 - size, -0.5, -0.6], dtype=dtype)
    tokens = Tokens(
        logp=logp.requires_grad_(),
        logp_behaviour=mu,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0], dtype=dtype),
        lengths=torch.ones(5, dtype=torch.long),
        sequences=torch.arange(5),
        logp_ref=mu,
    )
    algorithm = make(name, kl_coef=0.1, **settings)
    losses = algorithm.token_losses(tokens).loss
    (gradient,) = torch.autograd.grad(losses.sum(), logp)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert tokens.clamped.tolist() == [True] * 4 + [False]


def test_a_clamp_begins_beyond_twenty() -> None:
    tokens = tokens_of([([(-1.0, -21.0, -1.0), (-1.0, -21.5, -1.0), (-1.0, -1.0, -30.0)], 1.0)])
    assert tokens.clamped.tolist() == [False, True, True]


@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3)), min_size=1, max_size=6), st.floats(1.1, 4))
def test_the_dual_clip_is_the_formula(tokens: list[tuple[float, float, float]], c: float) -> None:
    logp, old, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    loss, clipped = clipped_surrogate(logp.requires_grad_(), old, advantages, 0.2, 0.28, c)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    for t, (new, before, a) in enumerate(tokens):
        r = math.exp(new - before)
        surrogate = min(r * a, min(max(r, 0.8), 1.28) * a)
        expected = max(surrogate, c * a) if a < 0 else surrogate
        assert loss[t].item() == pytest.approx(-expected, abs=1e-12)
        if abs(a) > 1e-6:
            assert (gradient[t] == 0) == bool(clipped[t])


def test_the_dual_clip_is_a_setting() -> None:
    sequences = [([(-0.1, -5.0, 0.0)], -1.0)]
    for name in ("grpo", "dapo", "dr_grpo", "gspo"):
        free, bounded = (
            make(name, dual_clip=c).token_losses(tokens_of(sequences)).loss.item() for c in (None, 3.0)
        )
        assert free == pytest.approx(math.exp(4.9)), name
        assert bounded == pytest.approx(3.0), name


def test_rows_of_a_split_trajectory_have_ratios_of_their_own() -> None:
    """GSPO: two rows of 2 and 1 tokens of one trajectory of 3, in one micro-batch or in two."""
    gspo = make("gspo", clip_low=0.9, clip_high=9.0)
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    mu = torch.tensor([-1.2, -2.4, -0.6], dtype=torch.float64)
    rows = [[0, 1], [2]]

    def tokens(which: list[int], sequences: list[int]) -> Tokens:
        ones = torch.ones(len(which), dtype=torch.float64)
        return Tokens(logp[which], mu[which], ones, torch.full((len(which),), 3), torch.tensor(sequences))

    whole = tokens([0, 1, 2], [0, 0, 1])
    parts = [tokens(row, [0] * len(row)) for row in rows]
    together = gspo.loss_sum(gspo.token_losses(whole).loss, whole.lengths).item()
    apart = sum(gspo.loss_sum(gspo.token_losses(part).loss, part.lengths).item() for part in parts)
    assert together == pytest.approx(-(2 / 3 * math.exp(0.3) + 1 / 3 * math.exp(0.1)))
    assert apart == pytest.approx(together)


REWARDS = st.lists(st.floats(-5, 5), min_size=1, max_size=6)


def facts(rewards: Sequence[float]) -> list[SampleFacts]:
    return [SampleFacts(reward, 3, True) for reward in rewards]


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_advantages_are_the_formulas(groups: list[list[float]]) -> None:
    def relative(rewards: list[float], everyone: list[float], normalize: bool) -> list[float]:
        if len(set(everyone)) == 1:
            return [0.0] * len(rewards)
        mean = sum(everyone) / len(everyone)
        std = math.sqrt(sum((r - mean) ** 2 for r in everyone) / (len(everyone) - 1)) + 1e-4
        return [(r - mean) / (std if normalize else 1.0) for r in rewards]

    everyone = [reward for group in groups for reward in group]
    for name in BUILT_IN:
        found = make(name).advantages_of([facts(group) for group in groups])
        for group, advantages in zip(groups, found, strict=True):
            if name == "reinforce":
                expected = relative(group, everyone, True)
            elif name == "rloo" and len(group) > 1:
                others = [(sum(group) - r) / (len(group) - 1) for r in group]
                expected = [r - o for r, o in zip(group, others, strict=True)]
            else:
                expected = relative(group, group, name != "dr_grpo")
            assert advantages == pytest.approx(expected, abs=1e-8), name


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_teach_nothing(name: str, reward: float) -> None:
    algorithm = make(name)
    equal, different = facts([reward] * 7), facts([reward] * 6 + [reward + 1])
    assert algorithm.teaches_nothing(equal) == (algorithm.scope == "group")
    assert not algorithm.teaches_nothing(different)
    assert not any(algorithm.advantages_of([equal])[0]), "exactly 0"


def test_in_a_batch_equal_rewards_can_teach() -> None:
    advantages = make("reinforce").advantages_of([facts([1.0, 1.0]), facts([0.0, 0.0])])
    assert advantages[0][0] == -advantages[1][0] > 0.5


def test_a_kl_term_needs_a_gradient_of_groups_without_advantage() -> None:
    assert not make("grpo").needs_gradient([0.0, 0.0])
    assert make("grpo", kl_coef=0.1).needs_gradient([0.0, 0.0])
    assert make("grpo").needs_gradient([0.0, 1.0])
