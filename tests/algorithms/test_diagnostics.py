"""Diagnostics against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.algorithms import effective_sample_size, logprob_difference, policy_kl

NEW = torch.tensor([-0.5, -1.0, -3.0, -0.1], dtype=torch.float64)
BEHAVIOUR = torch.tensor([-0.7, -0.4, -3.0, -1.1], dtype=torch.float64)


def test_the_effective_sample_size_is_the_formula() -> None:
    ratios = [math.exp(new - mu) for new, mu in zip(NEW.tolist(), BEHAVIOUR.tolist(), strict=True)]
    expected = sum(ratios) ** 2 / (4 * sum(r * r for r in ratios))
    assert effective_sample_size(NEW, BEHAVIOUR).item() == pytest.approx(expected)


def test_its_extremes() -> None:
    assert effective_sample_size(NEW, NEW - 1000).item() == pytest.approx(1)
    assert effective_sample_size(NEW + torch.tensor([0.0, 0, 0, 900]), NEW).item() == pytest.approx(1 / 4)


def test_kl_and_differences_are_the_formulas() -> None:
    drift = [new - mu for new, mu in zip(NEW.tolist(), BEHAVIOUR.tolist(), strict=True)]
    assert policy_kl(NEW, BEHAVIOUR).item() == pytest.approx(sum(math.exp(d) - d - 1 for d in drift) / 4)
    mean, largest = logprob_difference(NEW, BEHAVIOUR)
    assert mean.item() == pytest.approx(sum(map(abs, drift)) / 4)
    assert largest.item() == pytest.approx(1.0)
