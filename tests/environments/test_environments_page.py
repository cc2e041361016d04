"""The conversations on the page about environments work as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest
from world_cases import say

from headrace.environments import Action, episode_reward
from headrace.environments.base import is_conversation
from headrace.environments.validation import (
    MAX_DEPTH,
    MAX_REWARD,
    validate_observation,
    validate_step,
    validate_task,
)
from headrace.models.tool_calls import parse_assistant

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.fixture
def classes() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    return names


def write(text: str, tools: list[dict[str, Any]]) -> Action:
    return Action(text, parse_assistant(text, tools=tools), "stop")


def test_the_limits_are_those_of_the_code() -> None:
    size = f"{MAX_REWARD:g}".replace("+", "")
    assert PAGE.count(f"between -{size} and {size}") == 2
    assert f"nested at most {MAX_DEPTH} deep" in PAGE


def test_the_example_with_a_tool(classes: dict[str, Any]) -> None:
    world = classes["Multiply"]()
    assert is_conversation(world)
    train, test = (
        [validate_task(t, with_prompt=False) for t in world.tasks(split)] for split in ("train", "test")
    )
    assert not [task for task in test if task in train]
    observation = validate_observation(world.reset({"a": 1001, "b": 5322}))
    (tool,) = observation.tools
    # The form that the page gives to a model whose template leaves tools out.
    (told,) = re.findall(r"write (<tool_call>.*?</tool_call>)", PAGE)
    assert parse_assistant(told)["tool_calls"][0]["function"]["arguments"] == {"a": 12, "b": 34}
    step = validate_step(world.step(write(told.replace("12", "1001").replace("34", "5322"), [tool])))
    assert step.observation is not None
    assert step.observation.messages == [
        {"role": "tool", "tool_call_id": "call00000", "content": str(1001 * 5322)}
    ]
    assert not step.done
    last = validate_step(world.step(say(str(1001 * 5322))))
    assert last.done
    assert episode_reward([step.reward, last.reward]) == 1.0
    assert validate_step(world.step(say("I do not know"))).reward == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("add", "{}", "There is no tool add."),
        ("multiply", "{}", "Give the integers a and b."),
        ("multiply", '{"a": [1], "b": 2}', "Give the integers a and b."),
        ("multiply", '{"a": "three", "b": 2}', "Give the integers a and b."),
        ("multiply", '{"a": "3", "b": 2}', "6"),
    ],
)
def test_the_example_answers_any_call(
    classes: dict[str, Any], name: str, arguments: str, answer: str
) -> None:
    world = classes["Multiply"]()
    observation = validate_observation(world.reset({"a": 1, "b": 2}))
    call = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    for turn in range(1, 5):
        step = validate_step(world.step(write(call, observation.tools)))
        assert step.observation is not None
        assert step.observation.messages[-1]["content"] == answer
        assert step.done == (turn == 4)
