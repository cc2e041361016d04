"""The example of a conversation."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from world_cases import say

from headrace.environments import load_environment
from headrace.environments.validation import validate_observation, validate_step, validate_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "guess_number.py"


def play(task: dict[str, Any], *guesses: object) -> tuple[float, bool]:
    """What an episode is worth, and whether it is over."""
    world: Any = load_environment(f"{EXAMPLE}:GuessNumber")
    validate_observation(world.reset(task))
    total, done = 0.0, False
    for guess in guesses:
        assert not done
        step = validate_step(world.step(say(str(guess))))
        total, done = total + step.reward, step.done
    return total, done


@pytest.fixture
def task() -> dict[str, Any]:
    return {"low": 40, "high": 46, "number": 43}


def test_the_splits_share_no_range() -> None:
    world: Any = load_environment(f"{EXAMPLE}:GuessNumber")
    train, test = (
        {validate_task(task, with_prompt=False)["low"] for task in islice(world.tasks(split), 500)}
        for split in ("train", "test")
    )
    assert train
    assert test
    assert not train & test


def test_finding_it_is_worth_more_than_going_on_and_no_less_if_it_is_sooner(task: dict[str, Any]) -> None:
    at_once, later, never = play(task, 43), play(task, 45, 43), play(task, 45, 44, 40)
    assert at_once[0] >= later[0] - 1e-9
    assert later[0] > never[0] > 0
    assert at_once[1]
    assert later[1]
    assert never[1]  # the turns are over


def test_only_a_guess_that_is_still_possible_earns_something(task: dict[str, Any]) -> None:
    assert play(task, "five") == play(task, 99) == play(task, "") == (0.0, False)
    assert play(task, 45)[0] > play(task, "about 45")[0]
    assert play(task, 45, 47)[0] == play(task, 45)[0]
