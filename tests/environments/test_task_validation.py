"""What an environment may hand over, and what a user is told about the rest."""

import json
import math
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.environments import Environment, validate_reward, validate_task
from headrace.environments.arithmetic import Arithmetic
from headrace.environments.validation import MAX_REWARD
from headrace.errors import EnvironmentSetupError

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


class Level(IntEnum):
    HARD = 3


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_a_valid_task_survives_a_checkpoint(extra: dict) -> None:
    task = validate_task({**extra, "prompt": "?"})
    assert task == {**extra, "prompt": "?"}
    assert json.loads(json.dumps(task)) == task


def test_scalars_of_other_libraries_become_numbers() -> None:
    task = validate_task(
        {
            "prompt": "?",
            "a": np.float32(1.5),
            "b": np.int64(2),
            "c": np.bool_(True),
            "d": Level.HARD,
            "e": np.str_("x"),
        }
    )
    assert task == {"prompt": "?", "a": 1.5, "b": 2, "c": True, "d": 3, "e": "x"}
    assert [type(task[key]) for key in "abcde"] == [float, int, bool, int, str]


def test_chat_messages_are_a_prompt() -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
    assert validate_task({"prompt": messages})["prompt"] == messages


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("text", "yielded 'text' (str); yield a dict"),
        (None, "yielded None; yield a dict"),
        ({"question": "?"}, "without 'prompt' (its keys: 'question')"),
        ({"prompt": 3}, "'prompt' is 3 (int)"),
        ({"prompt": ""}, "empty 'prompt'"),
        ({"prompt": []}, "'prompt' is [] (list)"),
        ({"prompt": ["Hi"]}, "'prompt'[0] is 'Hi' (str)"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt'[0]"),
        ({"prompt": "?", "pair": (1, 2)}, "task['pair'] is (1, 2) (tuple)"),
        ({"prompt": "?", "x": {"y": [print]}}, "task['x']['y'][0] is <built-in function print>"),
        ({"prompt": "?", "x": {1: 2}}, "task['x'] has the key 1 (int)"),
        ({"prompt": "?", "x": np.ones(2)}, "task['x'] is array([1., 1.]) (ndarray)"),
        ({"prompt": "?", "x": math.nan}, "task['x'] is nan"),
    ],
)
def test_a_bad_task_is_one_clear_line(task: object, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        validate_task(task, "tasks('train')")
    assert message in str(error.value)
    assert str(error.value).startswith("tasks('train') yielded")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int8(1), np.bool_(True), np.array(1.0), Fraction(1)]
)
def test_numbers_are_rewards(value: object) -> None:
    reward = validate_reward(value)
    assert reward == 1.0
    assert type(reward) is float


@pytest.mark.parametrize(
    "value", [None, "x", "1", math.nan, math.inf, 10**400, [1.0], np.ones(2), 1j, np.float32("nan")]
)
def test_anything_else_is_not(value: object) -> None:
    with pytest.raises(
        EnvironmentSetupError, match=r"reward\(task, completion\) returned .*not a (finite )?number"
    ):
        validate_reward(value)


@pytest.mark.parametrize("value", [1e308, -1e308, np.float64(2 * MAX_REWARD), 10**300])
def test_a_reward_has_a_limit(value: object) -> None:
    assert validate_reward(MAX_REWARD) == MAX_REWARD
    assert validate_reward(-MAX_REWARD) == -MAX_REWARD
    with pytest.raises(EnvironmentSetupError) as error:
        validate_reward(value)
    assert "too large for a reward; keep it between -1e+" in str(error.value)


def test_the_protocol_is_what_an_environment_has() -> None:
    assert isinstance(Arithmetic(), Environment)
    assert not isinstance(object(), Environment)
