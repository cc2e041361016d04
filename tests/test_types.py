"""The nouns: sampling settings refuse what makes no sense, trajectories keep their lists together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.types import NOT_SAMPLED, Sampling, Trajectory, TrajectoryId


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "a"},
        {"temperature": None},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"n": "2"},
        {"n": True},
        {"seed": 1.5},
        {"stop": 5},
        {"stop": None},
        {"stop": [5]},
        {"stop": [""]},
        {"stop_token_ids": "ab"},
        {"stop_token_ids": [1.0]},
    ],
    ids=str,
)
def test_impossible_sampling_is_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**wrong)
    assert "\n" not in str(caught.value)
    assert next(iter(wrong)) in str(caught.value) or "stop" in str(caught.value)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert Sampling(stop="\n").stop == ("\n",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 5)), min_size=1))
def test_a_trajectory_keeps_its_lists_together(tokens: list[tuple[bool, int, int]]) -> None:
    trajectory = Trajectory(TrajectoryId(1, 2, 3), temperature=0.5)
    for sampled, token, version in tokens:
        if sampled:
            trajectory.append_sampled(token, -1.0, version)
        else:
            trajectory.append_observed([token])
    assert trajectory.token_ids == [token for _, token, _ in tokens]
    assert trajectory.num_sampled == sum(sampled for sampled, _, _ in tokens)
    assert [v == NOT_SAMPLED for v in trajectory.versions] == [not s for s in trajectory.sampled]
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory
    prompt = trajectory.prompt_length
    assert not any(trajectory.sampled[:prompt])
    assert prompt == len(tokens) or trajectory.sampled[prompt]
