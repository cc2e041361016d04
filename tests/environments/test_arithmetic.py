"""The built-in arithmetic environment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments import load_environment
from headrace.environments.arithmetic import Arithmetic
from headrace.errors import EnvironmentSetupError


def test_the_default_is_single_digit_addition() -> None:
    arithmetic = Arithmetic()
    train, test = arithmetic.tasks("train"), arithmetic.tasks("test")
    assert (len(train), len(test)) == (65, 16)
    prompts = {task["prompt"] for task in [*train, *test]}
    assert prompts == {
        f"What is {a} + {b}? Reply with only the number." for a in range(1, 10) for b in range(1, 10)
    }


@settings(max_examples=30)
@given(st.sets(st.sampled_from("+-*"), min_size=1), st.integers(-5, 5), st.integers(0, 7))
def test_the_splits_are_disjoint_and_complete(operators: set[str], minimum: int, span: int) -> None:
    arithmetic = Arithmetic(sorted(operators), minimum, minimum + span, "{a}{op}({b})")
    train, test = arithmetic.tasks("train"), arithmetic.tasks("test")
    seen = [task["prompt"] for task in [*train, *test]]
    assert len(set(seen)) == len(seen) == len(train) + len(test) == len(operators) * (span + 1) ** 2
    assert len(test) == len(seen) // 5
    assert all(eval(task["prompt"]) == task["answer"] for task in train)


def test_the_held_out_pairs_are_no_column_of_the_table() -> None:
    held_out = Arithmetic(minimum=0, maximum=9, prompt="{a} {op} {b}").tasks("test")
    assert {task["prompt"].split()[2] for task in held_out} == set("0123456789")


def test_large_ranges_are_lazy() -> None:
    train = Arithmetic(maximum=10**9).tasks("train")
    assert len(train) == 8 * 10**17
    assert train[len(train) - 1] == train[-1]
    assert train[:2] == [train[0], train[1]]
    with pytest.raises(IndexError):
        train[len(train)]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("5", 1.0), ("2 + 3 = 5.", 1.0), ("5, or 6", 0.0), ("", 0.0), ("-5", 0.0), ("five", 0.0)],
)
def test_the_last_integer_is_the_answer(completion: str, reward: float) -> None:
    assert Arithmetic().reward({"prompt": "What is 2 + 3?", "answer": 5}, completion) == reward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": ["/"]}, "operators: '/' is none of +, -, *"),
        ({"operators": []}, "operators must be a list"),
        ({"operators": [["+"]]}, "is none of"),
        ({"operators": 3}, "operators must be a list"),
        ({"minimum": "1"}, "minimum must be an integer, not '1'"),
        ({"maximum": 9.5}, "maximum must be an integer, not 9.5"),
        ({"maximum": True}, "maximum must be an integer, not True"),
        ({"minimum": 5, "maximum": 4}, "minimum (5) must not be above maximum (4)"),
        ({"prompt": "What is {a} + {c}?"}, "its fields are {a}, {op} and {b}"),
        ({"prompt": "{a[0]}{op}{b}"}, "its fields are {a}, {op} and {b}"),
        ({"prompt": "{"}, "its fields are {a}, {op} and {b}"),
        ({"prompt": "What is {a} + {b}?"}, "must contain {a}, {op} and {b}"),
        ({"prompt": 3}, "prompt must be text"),
        ({"maxmum": 3}, "unknown environment option 'maxmum' of arithmetic; did you mean 'maximum'?"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        load_environment("arithmetic", options)
    assert message in str(error.value)
