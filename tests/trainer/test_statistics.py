"""Statistics of tokens: merged they are those of all tokens, and they are the formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms import effective_sample_size, logprob_difference, policy_kl
from headrace.trainer import Divergence, TokenStatistics

LOGPROBS = st.floats(-20, 0)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans(), st.booleans(), st.integers(0, 4)), max_size=12)


def statistics(tokens: list[tuple[float, float, bool, bool, int]]) -> TokenStatistics:
    """Of tokens (log π, log μ, current, clipped, staleness)."""
    logp, behaviour, current, clipped, staleness = zip(*tokens, strict=True) if tokens else ((),) * 5
    result = TokenStatistics()
    result.add_tokens(
        torch.tensor(logp, dtype=torch.float64),
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(current, dtype=torch.bool),
        torch.tensor(clipped, dtype=torch.bool),
    )
    result.add_staleness(list(staleness))
    return result


def numbers(of: TokenStatistics) -> list[float]:
    """Every measure; -1 for one that has no value."""
    measures = [
        value
        for part in (of.drift, of.mismatch)
        for value in (part.tokens, part.difference_mean, part.difference_max, part.ess, part.kl)
    ]
    measures = [-1 if value is None else value for value in measures]
    return [*measures, of.clipped_ratio, of.staleness_mean, of.staleness_max]


@given(st.lists(TOKENS, max_size=4))
def test_merged_statistics_are_those_of_all_tokens(
    pieces: list[list[tuple[float, float, bool, bool, int]]],
) -> None:
    merged = TokenStatistics()
    for piece in pieces:
        merged.merge(statistics(piece))
    together = statistics([token for piece in pieces for token in piece])
    assert numbers(merged) == pytest.approx(numbers(together), rel=1e-9)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=30))
def test_a_divergence_is_the_formulas(tokens: list[tuple[float, float]]) -> None:
    logp, behaviour = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    divergence = Divergence()
    divergence.add(logp, behaviour)
    mean, largest = logprob_difference(logp, behaviour)
    assert divergence.ess == pytest.approx(effective_sample_size(logp, behaviour).item())
    assert divergence.kl == pytest.approx(policy_kl(logp, behaviour).item())
    assert divergence.difference_mean == pytest.approx(mean.item())
    assert divergence.difference_max == pytest.approx(largest.item())


def test_the_sample_size_is_that_of_the_samplers_tokens() -> None:
    """ρ = π/μ on tokens of μ, so that the share tends to 1 / Σ π²/μ; the other way round it is another number."""
    narrow, wide = torch.tensor([0.998, 0.002]).double().log(), torch.tensor([0.5, 0.5]).double().log()
    for policy, sampler in ((narrow, wide), (wide, narrow)):
        counts = (sampler.exp() * 1000).round().long()
        tokens = torch.repeat_interleave(torch.arange(2), counts)
        divergence = Divergence()
        divergence.add(policy[tokens], sampler[tokens])
        expected = 1 / (policy.exp().square() / sampler.exp()).sum()
        assert divergence.ess == pytest.approx(expected.item(), rel=1e-6)


def test_without_tokens_there_is_nothing_to_say() -> None:
    empty = TokenStatistics()
    empty.merge(statistics([]))
    assert (empty.mismatch.ess, empty.mismatch.kl, empty.mismatch.difference_mean) == (None, None, None)
    assert (empty.clipped_ratio, empty.staleness_mean) == (0, 0)
