"""A process that user code forked, and what else speaks on a worker's socket, costs no answer and no run."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from world_cases import begin, collect, contents, talk

from headrace.config import EnvironmentConfig
from headrace.environments import EnvironmentPool

FORKING = """
import asyncio, os, sys
from multiprocessing.connection import Connection

from headrace.environments.messages import Answered, Closed, Done, Ready, Refused


def misbehave(word):
    parent = Connection(os.dup(int(sys.argv[1])))
    if word == "fork":
        os.fork()
    if word == "fork and raise" and os.fork() == 0:
        raise ValueError("only the child")
    if word == "stray":
        for message in (Closed(99, None), Closed(1, None), Answered(2, None), Refused(2, "no")):
            parent.send(message)
        parent.send(Ready(True))
        parent.send({"not": "a message"})
    if word == "garbage":
        parent._send_bytes(b"neither pickled nor short")


class Talks:
    def tasks(self, split):
        return [{"n": 1}]

    def reset(self, task):
        misbehave(task.get("do"))
        self.turn = 0
        return "go on"

    async def step(self, action):
        misbehave(action.text)
        await asyncio.sleep(0)
        self.turn += 1
        return {"observation": str(self.turn), "reward": 1, "done": action.text == "end"}


class Rewards:
    def __init__(self, word=""):
        misbehave(word)

    def tasks(self, split):
        return [{"prompt": "?"}]

    def reward(self, task, completion):
        misbehave(completion)
        if completion == "done":
            Connection(os.dup(int(sys.argv[1]))).send(Done(1.0))
        return len(completion)
"""

MakePool = Callable[..., EnvironmentPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools = []

    def make(name: str, **options: Any) -> EnvironmentPool:
        (tmp_path / "forking.py").write_text(FORKING)
        config = EnvironmentConfig(
            name=f"{tmp_path / 'forking.py'}:{name}", options=options, timeout_s=10.0, workers=1
        )
        pools.append(EnvironmentPool(config, 0, output=subprocess.DEVNULL))
        pools[-1].start()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert not psutil.Process().children(recursive=True)


def rewards(pool: EnvironmentPool, *completions: str) -> list[tuple[float | None, str | None]]:
    """The reward and the error of each completion, one after another."""
    for number, completion in enumerate(completions):
        pool.submit(number, {"prompt": "?"}, completion)
    replies = collect(pool)
    return [(replies[number].reward, replies[number].error) for number in range(len(completions))]


def test_a_forked_child_that_goes_on_in_an_episode_answers_nothing(make_pool: MakePool) -> None:
    pool = make_pool("Talks")
    begin(pool, "a")
    begin(pool, "b", do="fork")
    for turn in range(1, 4):
        replies = talk(pool, a="fork", b="fork and raise")
        assert contents([replies["a"], replies["b"]]) == [str(turn)] * 2
    assert talk(pool, a="end", b="end")["b"].done
    begin(pool, *"abcd")
    assert pool.take_reports() == []


def test_a_forked_child_that_goes_on_in_a_reward_answers_nothing(make_pool: MakePool) -> None:
    pool = make_pool("Rewards", word="fork")
    completions = ["fork", "x", "fork and raise", "xx", "fork", "xxx"]
    assert rewards(pool, *completions) == [(len(text), None) for text in completions]
    assert pool.take_reports() == []


@pytest.mark.parametrize("name", ["Talks", "Rewards"])
def test_an_answer_to_nothing_is_dropped_and_told_once(make_pool: MakePool, name: str) -> None:
    pool = make_pool(name)
    if name == "Talks":
        begin(pool, "a", "b")
        for turn in range(1, 3):
            assert contents(talk(pool, a="stray").values()) == [str(turn)]
        assert contents(talk(pool, b="x").values()) == ["1"]
    else:
        # The second word comes when nothing is asked any more.
        assert rewards(pool, "stray", "stray") == [(5.0, None)] * 2
        assert rewards(pool, "done")[0][0] in (1.0, 4.0)
    (report,) = pool.take_reports()
    assert "to nothing that it was asked; such answers are dropped" in report


def test_a_worker_that_cannot_be_read_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool("Rewards")
    ((reward, error),) = rewards(pool, "garbage")
    assert reward is None
    assert error is not None
    assert error.endswith("ended its worker, which sent what cannot be read, and was killed")
    assert rewards(pool, "x") == [(1.0, None)]
