"""Token losses, importance weights and aggregation against plain loops over the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.algorithms import (
    TokenLoss,
    Tokens,
    aggregate,
    clipped_surrogate,
    denominator,
    k3_kl,
    load_algorithm,
    truncated_importance_weights,
)
from headrace.config import AlgorithmConfig

LOGPROB = st.floats(-6, 0)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, st.floats(-3, 3)), min_size=1, max_size=8)


def token_loss(
    logp: Tensor,
    logp_behaviour: Tensor,
    advantages: Tensor,
    *,
    ratio: str,
    kl_coef: float = 0.0,
    logp_ref: Tensor | None = None,
) -> TokenLoss:
    """GRPO's, with its preset ranges and cap."""
    grpo = load_algorithm(AlgorithmConfig(ratio=ratio, kl_coef=kl_coef))
    ones = torch.ones(len(logp), dtype=torch.long)
    return grpo.token_losses(Tokens(logp, logp_behaviour, advantages, ones, ones - 1, logp_ref))


def columns(tokens: list[tuple[float, ...]]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]


@given(TOKENS, st.floats(0, 0.9), st.floats(0, 2))
def test_the_surrogate_is_the_formula(tokens: list[tuple[float, ...]], low: float, high: float) -> None:
    logp, old, _, advantages = columns(tokens)
    loss, clipped = clipped_surrogate(logp, old, advantages, low, high)
    for t, (new, before, _, a) in enumerate(tokens):
        r = math.exp(new - before)
        assert loss[t].item() == pytest.approx(-min(r * a, min(max(r, 1 - low), 1 + high) * a))
        assert bool(clipped[t]) == ((a > 0 and r > 1 + high) or (a < 0 and r < 1 - low))


@given(TOKENS)
def test_clipped_tokens_are_those_without_gradient(tokens: list[tuple[float, ...]]) -> None:
    logp, old, _, advantages = columns(tokens)
    advantages = torch.where(advantages.abs() < 1e-3, 1.0, advantages)
    logp.requires_grad_()
    loss, clipped = clipped_surrogate(logp, old, advantages, 0.2, 0.28)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert torch.equal(gradient == 0, clipped)


@given(TOKENS, st.floats(0.1, 5))
def test_importance_weights_are_the_formula_and_have_no_gradient(
    tokens: list[tuple[float, ...]], cap: float
) -> None:
    old, behaviour, _, _ = columns(tokens)
    weights = truncated_importance_weights(old.requires_grad_(), behaviour, cap)
    assert not weights.requires_grad
    expected = [min(math.exp(pi - mu), cap) for pi, mu, _, _ in tokens]
    assert weights.tolist() == pytest.approx(expected)


@given(TOKENS)
def test_k3_is_the_formula_and_never_negative(tokens: list[tuple[float, ...]]) -> None:
    logp, ref, _, _ = columns(tokens)
    kl = k3_kl(logp, ref)
    assert kl.tolist() == pytest.approx([math.exp(r - p) - (r - p) - 1 for p, r, _, _ in tokens], abs=1e-12)
    assert (kl >= 0).all()


@given(TOKENS, st.sampled_from(["behaviour", "proximal"]), st.sampled_from([0.0, 0.04]))
def test_the_token_loss_is_the_formula(tokens: list[tuple[float, ...]], ratio: str, beta: float) -> None:
    logp, mu, ref, advantages = columns(tokens)
    loss = token_loss(logp, mu, advantages, ratio=ratio, kl_coef=beta, logp_ref=ref).loss
    for t, (p, m, r, a) in enumerate(tokens):
        if ratio == "behaviour":
            u, weight = math.exp(p - m), 1.0
        else:
            u, weight = 1.0, min(math.exp(p - m), 2.0)
        objective = weight * min(u * a, min(max(u, 0.8), 1.28) * a) - beta * (math.exp(r - p) - (r - p) - 1)
        assert loss[t].item() == pytest.approx(-objective, abs=1e-12)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
def test_on_policy_the_gradient_is_that_of_the_policy_gradient(ratio: str) -> None:
    """With r = 1 everywhere GRPO, DAPO and CISPO all have the gradient −A ∇logp."""
    logp, mu, _, advantages = columns(
        [(-0.5, -0.5, 0.0, 1.5), (-2.0, -2.0, 0.0, -0.7), (-1.0, -1.0, 0.0, 0.0)]
    )
    logp.requires_grad_()
    loss, clipped = token_loss(logp, mu, advantages, ratio=ratio)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert torch.allclose(gradient, -advantages, atol=1e-15)
    assert not clipped.any()


def test_the_kl_gradient_is_that_of_the_estimator() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(k3_kl(logp, ref).sum(), logp)
    assert torch.allclose(gradient, 1 - (ref - logp.detach()).exp())


def test_a_kl_term_needs_the_reference() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference"):
        token_loss(one, one, one, ratio="behaviour", kl_coef=0.1)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=6))
def test_aggregation_is_the_formula(sequences: list[list[float]]) -> None:
    loss = torch.tensor([value for sequence in sequences for value in sequence], dtype=torch.float64)
    lengths = [len(sequence) for sequence in sequences]
    per_token = torch.tensor([n for n in lengths for _ in range(n)])
    token = sum(map(sum, sequences)) / sum(lengths)
    sequence = sum(sum(values) / len(values) for values in sequences) / len(sequences)
    for aggregation, expected in (("token", token), ("sequence", sequence)):
        mean = aggregate(loss, per_token, aggregation).item() / denominator(lengths, aggregation)
        assert mean == pytest.approx(expected, abs=1e-12)
