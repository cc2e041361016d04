"""reasoning-gym's data sets as environments."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.environments import load_environment, validate_task
from headrace.environments.reasoning_gym import pack, unpack
from headrace.errors import EnvironmentSetupError

pytest.importorskip("reasoning_gym")


def test_a_data_set_by_name() -> None:
    gym = load_environment("reasoning_gym:chain_sum", {"size": 20, "seed": 3, "max_terms": 3})
    train, test = list(gym.tasks("train")), list(gym.tasks("test"))
    assert len(train) == len(test) == 20
    assert train == list(
        load_environment("reasoning_gym:chain_sum", {"size": 20, "seed": 3, "max_terms": 3}).tasks("train")
    )
    assert not {task["prompt"] for task in train} & {task["prompt"] for task in test}
    task = train[0]
    assert gym.reward(task, f"  {task['answer']}\n") == 1.0
    assert gym.reward(task, f"<answer>0</answer> so <answer> {task['answer']} </answer>.") == 1.0
    assert gym.reward(task, "no idea") < 1.0


@pytest.mark.parametrize("name", ["arc_agi", "rearc", "chain_sum", "word_ladder", "countdown"])
def test_a_task_scores_the_same_after_a_checkpoint(name: str) -> None:
    gym = load_environment(f"reasoning_gym:{name}", {"size": 2})
    task = validate_task(gym.tasks("train")[1])
    assert gym.reward(json.loads(json.dumps(task)), task["answer"]) == 1.0


def test_an_answer_that_cannot_be_parsed_scores_zero() -> None:
    gym = load_environment("reasoning_gym:prime_factorization", {"size": 1})
    assert gym.reward(gym.tasks("train")[0], "seven") == 0.0


def test_a_data_set_that_cannot_score_its_own_answer_is_broken() -> None:
    gym = load_environment("reasoning_gym:prime_factorization", {"size": 1})
    task = gym.tasks("train")[0]
    task["entry"] = pack({**unpack(task["entry"]), "answer": "seven"})
    with pytest.raises(ValueError, match="seven"):
        gym.reward(task, "eight")


def test_composite() -> None:
    part = {"name": "chain_sum", "weight": 1.0, "config": {"max_terms": 2}}
    gym = load_environment("reasoning_gym:composite", {"size": 3, "datasets": [part, {"name": "gcd"}]})
    task = gym.tasks("train")[0]
    assert gym.reward(task, task["answer"]) == 1.0
    with pytest.raises(EnvironmentSetupError, match="both splits the same tasks"):
        load_environment("reasoning_gym:composite", {"datasets": [{"name": "gcd", "config": {"seed": 1}}]})
    with pytest.raises(EnvironmentSetupError, match="write datasets ="):
        load_environment("reasoning_gym:composite", {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sun", {}, "no such data set; did you mean 'chain_sum'?"),
        (
            "chain_sum",
            {"max_term": 2},
            "unknown environment option 'max_term' of reasoning_gym:chain_sum; did you mean",
        ),
        ("chain_sum", {"min_terms": 9}, "wrong options: max_terms must be >= min_terms"),
        ("chain_sum", {"size": "ten"}, "size must be an integer"),
        ("chain_sum", {"size": 0}, "size must be an integer from 1"),
        ("chain_sum", {"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_mistakes(name: str, options: dict, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        load_environment(f"reasoning_gym:{name}", options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(EnvironmentSetupError, match=r"pip install 'headrace\[reasoning-gym\]'"):
        load_environment("reasoning_gym:chain_sum")


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            SCALARS | st.tuples(SCALARS, SCALARS) | st.sampled_from(["tuple", "dict"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@given(VALUES)
def test_packing_is_lossless_through_json(value: object) -> None:
    restored = unpack(json.loads(json.dumps(pack(value))))
    assert repr(restored) == repr(value)
