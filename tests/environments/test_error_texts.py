"""Whatever a worker says about an error can be written as UTF-8, wherever the text came from."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from world_cases import collect, say

from headrace.config import EnvironmentConfig
from headrace.environments import EnvironmentPool
from headrace.errors import EnvironmentFailure, EnvironmentSetupError

ODD = """
class Odd:
    def __repr__(self):
        return "bad \\ud800, é is fine"


def misbehave(word):
    if word == "raise":
        raise ValueError("bad \\ud800, é is fine")
    return Odd() if word == "odd" else None


class Talks:
    def __init__(self, word=""):
        misbehave(word)

    def tasks(self, split):
        return [{"n": 1}]

    def reset(self, task):
        self.close_word = task.get("close")
        return misbehave(task.get("do")) or "go on"

    def step(self, action):
        return misbehave(action.text)

    def close(self):
        misbehave(self.close_word)


class Rewards:
    def tasks(self, split):
        yield {"prompt": "?"} if split == "train" else Odd()

    def reward(self, task, completion):
        return misbehave(completion)
"""
TOLD = "bad \\ud800, é is fine"

MakePool = Callable[..., EnvironmentPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools: list[EnvironmentPool] = []

    def make(name: str, **options: Any) -> EnvironmentPool:
        (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
        config = EnvironmentConfig(name=f"{tmp_path / 'odd.py'}:{name}", options=options, timeout_s=10.0)
        pools.append(EnvironmentPool(config, 0, output=subprocess.DEVNULL))
        pools[-1].start()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def assert_written(text: str | None) -> None:
    assert text is not None
    assert TOLD in text
    text.encode()


def test_errors_of_episodes(make_pool: MakePool) -> None:
    pool = make_pool("Talks")
    for word in ("raise", "odd"):
        pool.reset(f"reset {word}", {"do": word})
        pool.reset(f"step {word}", {})
    replies = collect(pool)
    assert replies["step odd"].error is replies["step raise"].error is None
    for word in ("raise", "odd"):
        assert_written(replies[f"reset {word}"].error)
        pool.step(f"step {word}", say(word))
    for reply in collect(pool).values():
        assert_written(reply.error)
    with pytest.raises(EnvironmentSetupError) as error:
        pool.observe({"close": "raise"})
    assert "close() raised" in str(error.value)
    assert_written(str(error.value))


def test_errors_of_tasks_and_rewards(make_pool: MakePool) -> None:
    pool = make_pool("Rewards")
    for word in ("raise", "odd"):
        pool.submit(word, {}, word)
    replies = collect(pool)
    assert len(replies) == 2
    for reply in replies.values():
        assert_written(reply.error)
    with pytest.raises(EnvironmentFailure) as error:
        pool.test_tasks(1)
    assert_written(str(error.value))


def test_an_environment_that_cannot_be_built(make_pool: MakePool) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        make_pool("Talks", word="raise")
    assert_written(str(error.value))
