"""Statistics of tokens: merged they are those of all tokens, and they are the formulas."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms import effective_sample_size, logprob_difference, policy_kl
from headrace.measures import Divergence, GradientResult, SampleOutcome, TokenStatistics
from headrace.schedule import Bucket
from headrace.trainer import divergence_of, token_statistics_of
from headrace.types import TrajectoryId

LOGPROBS = st.floats(-20, 0)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans(), st.booleans(), st.integers(0, 4)), max_size=12)


def statistics(tokens: list[tuple[float, float, bool, bool, int]]) -> TokenStatistics:
    """Of tokens (log π, log μ, current, clipped, staleness)."""
    logp, behaviour, current, clipped, staleness = zip(*tokens, strict=True) if tokens else ((),) * 5
    result = token_statistics_of(
        torch.tensor(logp, dtype=torch.float64),
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(current, dtype=torch.bool),
        torch.tensor(clipped, dtype=torch.bool),
        torch.tensor([age > 3 for age in staleness], dtype=torch.bool),
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
    return [*measures, of.clipped_ratio, of.clamped_ratio, of.staleness_mean, of.staleness_max]


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
    divergence = divergence_of(logp, behaviour)
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
        divergence = divergence_of(policy[tokens], sampler[tokens])
        expected = 1 / (policy.exp().square() / sampler.exp()).sum()
        assert divergence.ess == pytest.approx(expected.item(), rel=1e-6)


def test_without_tokens_there_is_nothing_to_say() -> None:
    empty = TokenStatistics()
    empty.merge(statistics([]))
    assert (empty.mismatch.ess, empty.mismatch.kl, empty.mismatch.difference_mean) == (None, None, None)
    assert (empty.clipped_ratio, empty.clamped_ratio, empty.staleness_mean) == (0, 0, 0)


@given(TOKENS)
def test_they_survive_json_exactly(tokens: list[tuple[float, float, bool, bool, int]]) -> None:
    samples = [
        SampleOutcome(TrajectoryId(3, i, 1), bucket, 7 + i, 0.1 * i)
        for i, bucket in enumerate((Bucket.TRAINED, Bucket.MASKED, Bucket.ZERO_ADVANTAGE))
    ]
    result = GradientResult(0.1 + 0.2, 24, samples, 1, 2, statistics(tokens))
    again = GradientResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result
    assert [type(sample) for sample in again.samples] == [SampleOutcome] * 3
    assert again.samples[0].bucket is Bucket.TRAINED
    assert isinstance(again.samples[0].id, TrajectoryId)
    assert (again.tokens_trained, again.tokens_masked, again.tokens_zero_advantage) == (7, 8, 9)


def test_a_huge_log_ratio_leaves_the_sums_finite() -> None:
    divergence = divergence_of(
        torch.tensor([-1.0, -1000.0]), torch.tensor([-1000.0, -1.0], dtype=torch.float64)
    )
    assert divergence.difference_max == 999
    assert divergence == Divergence.from_dict(json.loads(json.dumps(divergence.to_dict(), allow_nan=False)))


def test_measures_and_settings_import_no_torch() -> None:
    code = (
        "import sys, headrace.measures, headrace.config, headrace.presets; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
