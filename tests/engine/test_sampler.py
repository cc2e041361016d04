"""The sampler against the definitions of softmax, top-k, top-p and inverse-CDF sampling."""

import math

import pytest
import torch
from engine_cases import plain_distribution, plain_draw, plain_logprob
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.sampler import random_key, sample, uniform
from headrace.types import Sampling

HIGHEST = 1.0 - 2.0**-53
DTYPES = [torch.float32, torch.float64]


def rows(seed: int, count: int, vocabulary: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64).to(dtype)


def draw(
    logits: torch.Tensor, samplings: list[Sampling], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    return sample(
        logits.clone(),
        [s.temperature for s in samplings],
        [s.top_k for s in samplings],
        [s.top_p for s in samplings],
        uniforms,
    )


class TestUniform:
    @given(key=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
    def test_is_deterministic_and_below_one(self, key: int, position: int) -> None:
        assert uniform(key, position) == uniform(key, position)
        assert 0.0 <= uniform(key, position) < 1.0

    def test_is_uniform_over_positions_and_over_keys(self) -> None:
        count, bins = 20_000, 50
        for numbers in (
            [uniform(random_key(1, 2, 3, 4), position) for position in range(count)],
            [uniform(random_key(1, group), 5) for group in range(count)],
            [uniform(key, 5) for key in range(count)],
        ):
            observed = torch.histc(torch.tensor(numbers, dtype=torch.float64), bins, 0, 1)
            chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
            # 49 degrees of freedom: mean 49, standard deviation 9.9.
            assert chi_square < 49 + 5 * 9.9

    def test_neighbours_are_uncorrelated(self) -> None:
        """Next position, next sample, next attempt and bare neighbouring keys: |r| within 5/sqrt(n)."""
        count = 10_000
        here = torch.tensor([uniform(random_key(0, i, 0, 0), 7) for i in range(count)], dtype=torch.float64)
        others = [
            [uniform(random_key(0, i, 0, 0), 8) for i in range(count)],
            [uniform(random_key(0, i, 1, 0), 7) for i in range(count)],
            [uniform(random_key(0, i, 0, 1), 7) for i in range(count)],
            [uniform(random_key(1, i, 0, 0), 7) for i in range(count)],
        ]
        for other in others:
            pair = torch.stack([here, torch.tensor(other, dtype=torch.float64)])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(count)
        bare = torch.tensor(
            [[uniform(key + d, 0) for key in range(count)] for d in (0, 1)], dtype=torch.float64
        )
        assert abs(float(torch.corrcoef(bare)[0, 1])) < 5 / math.sqrt(count)

    def test_keys_differ_where_their_parts_do(self) -> None:
        parts = [(1, 23), (12, 3), ("1", "2", "3"), (123,), (1, 2, 3, 0), (1, 3, 2)]
        assert len({random_key(*part) for part in parts}) == len(parts)
        assert 0 <= random_key(0) < 2**64


class TestDistribution:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(temperature=1.0),
            Sampling(temperature=0.5),
            Sampling(temperature=2.0, top_k=4),
            Sampling(temperature=1.3, top_p=0.7),
            Sampling(temperature=0.9, top_k=6, top_p=0.8),
        ],
    )
    def test_frequencies_follow_the_probabilities(self, sampling: Sampling, dtype: torch.dtype) -> None:
        """Pearson's chi-square of 20,000 draws with the engine's own uniforms."""
        count = 20_000
        logits = rows(3, 1, 12, dtype)
        uniforms = [uniform(random_key("chi", sampling.temperature), i) for i in range(count)]
        ids, _ = draw(logits.expand(count, -1), [sampling] * count, uniforms)
        expected = count * torch.tensor(plain_distribution(logits[0], sampling), dtype=torch.float64)
        observed = torch.bincount(torch.tensor(ids), minlength=12).double()
        possible = expected > 0
        assert observed[~possible].sum() == 0
        chi_square = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
        freedom = int(possible.sum()) - 1
        assert chi_square < freedom + 5 * math.sqrt(2 * max(freedom, 1))

    @given(
        seed=st.integers(0, 10_000),
        vocabulary=st.integers(1, 40),
        samplings=st.lists(
            st.builds(
                Sampling,
                temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5]),
                top_k=st.integers(0, 45),
                top_p=st.sampled_from([0.01, 0.3, 0.75, 0.95, 1.0]),
            ),
            min_size=1,
            max_size=6,
        ),
        data=st.data(),
    )
    @settings(max_examples=150, deadline=None)
    def test_every_draw_equals_the_transcription(
        self, seed: int, vocabulary: int, samplings: list[Sampling], data: st.DataObject
    ) -> None:
        """Rows of one call may be sampled in different ways; log-probs are those before the cuts."""
        logits = rows(seed, len(samplings), vocabulary)
        uniforms = data.draw(
            st.lists(st.floats(0, HIGHEST), min_size=len(samplings), max_size=len(samplings)), "uniforms"
        )
        ids, logprobs = draw(logits, samplings, uniforms)
        for row, sampling, u, token, logprob in zip(logits, samplings, uniforms, ids, logprobs, strict=True):
            distribution = plain_distribution(row, sampling)
            expected = plain_draw(row, sampling, u)
            # A uniform that falls on an edge of the distribution to within rounding may go either way.
            below = math.fsum(distribution[: min(token, expected) + 1])
            assert token == expected or abs(below - u) < 1e-12
            assert distribution[token] > 0
            assert logprob == pytest.approx(plain_logprob(row, sampling, token), abs=1e-12)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_greedy_takes_the_most_likely_and_reports_temperature_one(self, dtype: torch.dtype) -> None:
        logits = rows(5, 4, 30, dtype)
        samplings = [Sampling(temperature=0, top_k=3), Sampling(temperature=0.5), Sampling(temperature=0)] * 2
        ids, logprobs = draw(logits, samplings[:4], [HIGHEST] * 4)
        for i in (0, 2, 3):
            assert ids[i] == int(logits[i].argmax())
            assert logprobs[i] == pytest.approx(float(torch.log_softmax(logits[i], -1).max()), abs=1e-5)

    def test_top_k_with_ties_keeps_exactly_k(self) -> None:
        drawn = {draw(torch.zeros(1, 6), [Sampling(top_k=2)], [u / 100])[0][0] for u in range(100)}
        assert len(drawn) == 2

    def test_top_p_keeps_the_token_that_reaches_it(self) -> None:
        logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
        for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})):
            drawn = {draw(logits, [Sampling(top_p=top_p)], [u / 200])[0][0] for u in range(200)}
            assert drawn == kept


class TestExtremes:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("u", [0.0, HIGHEST])
    def test_a_token_of_probability_zero_is_never_drawn(self, u: float, dtype: torch.dtype) -> None:
        impossible = float("-inf")
        logits = torch.tensor(
            [
                [impossible, impossible, 0.0, 1.0, impossible],
                [-2000.0, 3.0, -2000.0, -2000.0, -2000.0],
                [0.0, impossible, impossible, impossible, 0.0],
            ],
            dtype=dtype,
        )
        ids, logprobs = draw(logits, [Sampling()] * 3, [u] * 3)
        assert ids == ([2, 1, 0] if u == 0.0 else [3, 1, 4])
        assert all(math.isfinite(logprob) for logprob in logprobs)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "sampling", [Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=7, top_p=0.9)]
    )
    @pytest.mark.parametrize("u", [0.0, 0.5, HIGHEST])
    def test_what_a_cut_removed_is_never_drawn(
        self, sampling: Sampling, u: float, dtype: torch.dtype
    ) -> None:
        for seed in range(20):
            logits = rows(seed, 1, 25, dtype)
            token = draw(logits, [sampling], [u])[0][0]
            assert plain_distribution(logits[0], sampling)[token] > 0

    def test_the_highest_uniform_in_a_large_float32_vocabulary(self) -> None:
        """Rounding of a long float32 sum must not push the draw past the end, or onto an impossible id."""
        logits = rows(1, 8, 50_000, torch.float32)
        logits[:, -100:] = float("-inf")
        ids, logprobs = draw(logits, [Sampling()] * 8, [HIGHEST] * 8)
        assert all(0 <= token < 49_900 for token in ids)
        assert all(math.isfinite(logprob) for logprob in logprobs)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
    def test_a_tiny_temperature_is_greedy_and_finite(self, temperature: float, dtype: torch.dtype) -> None:
        logits = rows(2, 3, 20, dtype)
        ids, logprobs = draw(logits, [Sampling(temperature=temperature)] * 3, [0.0, 0.5, HIGHEST])
        assert ids == logits.argmax(-1).tolist()
        assert logprobs == pytest.approx([0.0] * 3, abs=1e-6)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("cut", [False, True])
    def test_broken_logits_give_a_log_prob_that_is_not_finite(
        self, temperature: float, bad: float, cut: bool
    ) -> None:
        """The engine turns it into an error; the sampler must not crash, nor spoil the other rows."""
        logits = rows(2, 3, 20)
        logits[1, 4] = bad
        sampling = Sampling(temperature=temperature, top_k=5 if cut else 0, top_p=0.9 if cut else 1.0)
        ids, logprobs = draw(logits, [sampling] * 3, [0.3, HIGHEST, 0.6])
        assert not math.isfinite(logprobs[1])
        for i, u in ((0, 0.3), (2, 0.6)):
            assert ids[i] == plain_draw(logits[i], sampling, u)
            assert math.isfinite(logprobs[i])
