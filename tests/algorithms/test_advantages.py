"""Group advantages against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms import group_advantages

REWARDS = st.lists(st.floats(-5, 5, allow_nan=False), min_size=2, max_size=12)


@given(REWARDS)
def test_normalised_advantages_are_the_formula(rewards: list[float]) -> None:
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), normalize_std=True).tolist()
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    expected = [0.0 if len(set(rewards)) == 1 else (r - mean) / (std + 1e-4) for r in rewards]
    assert result == pytest.approx(expected, abs=1e-9)


@given(REWARDS)
def test_without_the_deviation_only_the_mean_is_taken_off(rewards: list[float]) -> None:
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), normalize_std=False).tolist()
    mean = sum(rewards) / len(rewards)
    assert result == pytest.approx([r - mean for r in rewards], abs=1e-9)
    assert sum(result) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(normalize_std: bool, reward: float, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        assert not group_advantages(torch.full((size,), reward, dtype=dtype), normalize_std).any()


def test_known_values() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert group_advantages(rewards, True).tolist() == pytest.approx(
        [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    )
