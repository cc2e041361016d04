"""What `reset`, `step` and `snapshot` may return, and what a user is told about the rest."""

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.environments import ConversationEnvironment, Observation, Step, WorldReply, load_environment
from headrace.environments.validation import (
    MAX_DEPTH,
    MAX_REWARD,
    validate_observation,
    validate_snapshot,
    validate_step,
)
from headrace.errors import EnvironmentSetupError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.builds(
        lambda extra, role, content: {**extra, "role": role, "content": content},
        st.dictionaries(st.sampled_from(["name", "tool_call_id", "reasoning_content"]), st.text()),
        st.sampled_from(["user", "tool", "system", "assistant"]),
        st.text(),
    ),
    min_size=1,
    max_size=3,
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "Hi"}


@given(
    MESSAGES,
    st.floats(-MAX_REWARD, MAX_REWARD),
    st.dictionaries(st.text(), PLAIN, max_size=3),
    PLAIN,
    st.booleans(),
)
def test_a_reply_survives_a_journal(
    messages: list, reward: float, info: dict, snapshot: object, done: bool
) -> None:
    step = validate_step({"observation": messages, "reward": reward, "done": done, "info": info})
    assert step == Step(Observation(messages), reward, done, info)
    reply = WorldReply((1, 2, 3), step.reward, None, step.observation, step.done, step.info, snapshot, 0.25)
    data = json.loads(json.dumps(reply.to_dict()))
    again = WorldReply.from_dict(data | {"key": (1, 2, 3), "kind": "what a journal adds"})
    assert again == reply
    assert again.seconds == 0.25
    assert again.step == step


def test_a_failed_reply_survives_a_journal() -> None:
    reply = WorldReply(None, None, "it raised")
    assert WorldReply.from_dict(json.loads(json.dumps(reply.to_dict()))) == reply


@pytest.mark.parametrize(
    ("value", "observation"),
    [
        ("Hi", Observation([USER])),
        ([USER], Observation([USER])),
        ({"messages": [USER], "tools": [TOOL]}, Observation([USER], [TOOL])),
        (Observation([USER], [TOOL]), Observation([USER], [TOOL])),
        (
            [{"role": "assistant", "tool_calls": [CALL]}],
            Observation([{"role": "assistant", "tool_calls": [CALL]}]),
        ),
        ([{**USER, "place": np.int64(3)}], Observation([{**USER, "place": 3}])),
    ],
)
def test_the_ways_to_write_an_observation(value: object, observation: Observation) -> None:
    assert validate_observation(value) == observation


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "reset(task) returned None; return an Observation, a list of chat messages or a string"),
        (3, "returned 3 (int)"),
        ("", "says nothing"),
        ([], "says nothing"),
        ({"messages": []}, "says nothing"),
        (({"role": "user", "content": "Hi"},), "(tuple); return an Observation"),
        (["Hi"], "messages[0] is 'Hi' (str)"),
        ([USER, {"content": "Hi"}], "messages[1] is"),
        ([{"role": "", "content": "Hi"}], "messages[0] is"),
        ([{"role": "user"}], "messages[0]['content'] is None; use a string"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "messages[0]['content'] is ["),
        ([{"role": "assistant", "content": "x", "tool_calls": "add"}], "messages[0]['tool_calls'] is 'add'"),
        ([{"role": "assistant", "tool_calls": [{"name": "add"}]}], "a tool call is {"),
        ([{**USER, "when": print}], "messages[0]['when'] is <built-in"),
        ([{**USER, "when": math.nan}], "messages[0]['when'] is nan"),
        ({"message": [USER]}, "unknown field 'message'; did you mean 'messages'?"),
        (Observation([USER], "add"), "returned tools that are 'add' (str)"),  # type: ignore[arg-type]
        (Observation([USER], [{"name": "add"}]), "tools[0] is {'name': 'add'} (dict); a tool is"),
        (
            Observation([USER], [{"type": "function", "function": {"name": "add"}}]),
            "without a proper 'description'",
        ),
    ],
)
def test_a_bad_observation_is_one_clear_line(value: object, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        validate_observation(value)
    assert message in str(error.value)
    assert str(error.value).startswith("reset(task) returned")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "step"),
    [
        (Step("Hi", 1, False), Step(Observation([USER]), 1.0)),  # type: ignore[arg-type]
        ({"observation": "Hi"}, Step(Observation([USER]))),
        ({"done": True}, Step(None, 0.0, True)),
        ({"done": np.bool_(True), "reward": np.float32(0.5)}, Step(None, 0.5, True)),
        (("Hi", 0.5, False), Step(Observation([USER]), 0.5)),
        ((None, True, True, {"why": "found"}), Step(None, 1.0, True, {"why": "found"})),
    ],
)
def test_the_ways_to_write_a_step(value: object, step: Step) -> None:
    assert validate_step(value) == step
    assert type(validate_step(value).reward) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None; return a Step, or a dict with observation, reward, done, info"),
        ("Hi", "returned 'Hi' (str)"),
        (("Hi", 0.5), "(tuple)"),
        (
            {"observation": "Hi", "rewards": 1},
            "a step with the unknown field 'rewards'; did you mean 'reward'?",
        ),
        ({}, "not done and has no observation"),
        ({"observation": "Hi", "reward": None}, "returned None, not a number"),
        ({"done": True, "reward": math.inf}, "not a finite number"),
        ({"done": "yes"}, "whose done is 'yes' (str); use True or False"),
        ({"done": True, "info": [1]}, "whose info is [1] (list); use a dict"),
        ({"done": True, "info": {"seen": {1, 2}}}, "info['seen'] is {1, 2} (set)"),
        ({"observation": {"messages": [{"role": "tool"}]}}, "messages[0]['content'] is None"),
    ],
)
def test_a_bad_step_is_one_clear_line(value: object, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        validate_step(value)
    assert message in str(error.value)
    assert str(error.value).startswith("step(action) returned")
    assert "\n" not in str(error.value)


def nested(depth: int) -> Any:
    """Lists and dicts within each other, `depth` of them."""
    value: Any = []
    for level in range(depth - 1):
        value = [value] if level % 2 else {"in": value}
    return value


def test_how_deep_data_may_be_nested_does_not_hang_on_the_limit_of_recursion() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        assert validate_snapshot(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
        for depth in (MAX_DEPTH + 1, 2000):
            for read in (validate_snapshot, lambda data: validate_step({"done": True, "info": {"x": data}})):
                with pytest.raises(EnvironmentSetupError) as error:
                    read(nested(depth))
                assert f"nested more than {MAX_DEPTH} deep, at " in str(error.value)
                assert len(str(error.value)) < 200
    finally:
        sys.setrecursionlimit(limit)


@given(PLAIN.filter(lambda value: value is not None))
def test_a_snapshot_is_plain_data(value: Any) -> None:
    assert validate_snapshot(value) == value


@pytest.mark.parametrize("value", [None, sys.stdin, {1: 2}, (1, 2), math.nan])
def test_anything_else_is_no_snapshot(value: object) -> None:
    with pytest.raises(EnvironmentSetupError, match=r"snapshot\(\) returned"):
        validate_snapshot(value)


def test_the_protocol_is_what_a_conversation_has() -> None:
    assert not isinstance(load_environment("arithmetic"), ConversationEnvironment)

    class Talks:
        tasks = reset = step = print

    assert isinstance(Talks(), ConversationEnvironment)
