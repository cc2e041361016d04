"""Worlds for the tests of conversations, and helpers that drive a pool through them."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from headrace.environments import Action, EnvironmentPool, WorldReply

WORLD_FILE = '''
import asyncio, ctypes, json, os, sys, time

from headrace.environments import Action, Observation, Step

LIVE = []


def note(folder, text):
    if folder:
        with open(os.path.join(folder, "notes"), "a") as file:
            file.write(text + "\\n")


class Sum:
    """Adds up what the policy says; "done" ends it. Some words make it misbehave."""

    def __init__(self, folder="", option=None):
        self.folder, self.total, self.count = folder, 0, None
        if option is not None:
            option.append(1)
        self.option = option

    def tasks(self, split):
        return [{"n": n, "split": split} for n in range(10 if split == "train" else 4)]

    def reset(self, task):
        LIVE.append(self)
        self.task, self.total = task, task["n"]
        time.sleep(task.get("sleep", 0))
        if task.get("do"):
            return self.act(task["do"])
        return Observation([{"role": "user", "content": f"{self.total}"}])

    def step(self, action):
        assert isinstance(action, Action) and action.message["role"] == "assistant"
        return self.act(action.text)

    def act(self, word):
        if word == "done":
            return Step(reward=float(self.total), done=True, info={"total": self.total})
        if word == "hang":
            while True:
                pass
        if word == "hold the interpreter":
            ctypes.PyDLL(None).sleep(600)
        if word == "exit":
            os._exit(3)
        if word == "raise":
            raise ZeroDivisionError("not\\ntoday")
        if word == "sys.exit":
            sys.exit("leaving")
        if word == "nothing":
            return None
        if word == "nan":
            return {"reward": float("nan"), "done": True}
        if word == "silent":
            return Step()
        if word == "live":
            return {"observation": "live", "reward": len({id(each) for each in LIVE})}
        if word == "pid":
            return {"observation": "here", "info": {"pid": os.getpid()}}
        if word == "option":
            return {"observation": str(len(self.option))}
        if word == "sleep":
            time.sleep(0.3)
        if word == "random":
            return {"observation": str(time.time_ns())}
        if word == "once":  # hangs, but not a second time
            mark = os.path.join(self.folder, "once")
            if not os.path.exists(mark):
                open(mark, "w").close()
                os._exit(3)
        self.total += len(word)
        return {"observation": f"{self.total}", "reward": 1, "info": {"pid": os.getpid()}}

    def close(self):
        note(self.folder, f"closed {self.task['n']} at {self.total}")
        if self.task.get("close") == "raise":
            raise OSError("stuck")
        if self.task.get("close") == "hang":
            time.sleep(600)


class Saved(Sum):
    """The same with snapshots. It notes whenever it is reset."""

    def reset(self, task):
        note(self.folder, f"reset {task['n']}")
        return super().reset(task)

    def snapshot(self):
        return {"total": self.total}

    async def restore(self, task, data):
        note(self.folder, f"restored {task['n']}")
        self.task, self.total = task, data["total"]


class Async(Sum):
    async def reset(self, task):
        await asyncio.sleep(0)
        return super().reset(task)

    async def step(self, action):
        word, _, seconds = action.text.partition(" ")
        if word == "wait":
            try:
                await asyncio.sleep(float(seconds))
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
                note(self.folder, f"left {self.task['n']}")
                raise
        if word == "stubborn":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        if word == "sys.exit":
            sys.exit("leaving")
        if word == "cancel":
            raise asyncio.CancelledError
        return self.act(word)

    async def close(self):
        await asyncio.sleep(0)
        super().close()


class BadSnapshot(Saved):
    def snapshot(self):
        return {"file": sys.stdin}


class NoneSnapshot(Saved):
    def snapshot(self):
        return None


class HalfSaved(Sum):
    def snapshot(self):
        return 1


class NoStep(Sum):
    step = None


class BadReset(Sum):
    def reset(self, task):
        return {"messages": [{"role": "user"}]}


class BadClose(Sum):
    def close(self):
        raise OSError("stuck")


class Tools(Sum):
    TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}

    def reset(self, task):
        return Observation([{"role": "user", "content": "Hi"}], [self.TOOL])

    def step(self, action):
        if action.text == "other":
            return Step(Observation([{"role": "tool", "content": "1"}], [self.TOOL, self.TOOL]))
        return Step(Observation([{"role": "tool", "content": json.dumps(action.message)}], [self.TOOL]))


class SlowStart(Sum):
    """A worker of it takes a second to be built while there is a file "slow"."""

    built = 0

    def __init__(self, folder=""):
        super().__init__(folder)
        type(self).built += 1
        if type(self).built == 1 and os.path.exists(os.path.join(folder, "slow")):
            time.sleep(1.0)


class FailsInConstructor(Sum):
    built = 0

    def __init__(self, after=0):
        super().__init__()
        type(self).built += 1
        if type(self).built > after:
            raise RuntimeError("no key")
'''


def write_worlds(folder: Path) -> Path:
    path = folder / "talking_worlds.py"
    path.write_text(WORLD_FILE)
    return path


def say(text: str) -> Action:
    return Action(text, {"role": "assistant", "content": text}, "stop")


def collect(pool: EnvironmentPool, timeout_s: float = 20.0) -> dict[Any, WorldReply]:
    """Every reply that is pending."""
    replies: dict[Any, WorldReply] = {}
    deadline = time.monotonic() + timeout_s
    while pool.pending and time.monotonic() < deadline:
        replies.update((reply.key, reply) for reply in pool.wait(1.0))
    assert not pool.pending
    return replies


def begin(pool: EnvironmentPool, *keys: Hashable, **task: Any) -> dict[Any, WorldReply]:
    """Reset one episode per key, at n = 1 unless told otherwise."""
    for key in keys:
        pool.reset(key, {"n": 1, **task})
    replies = collect(pool)
    assert set(replies) == set(keys)
    return replies


def talk(pool: EnvironmentPool, **texts: str) -> dict[Any, WorldReply]:
    """One action for each key, all at once."""
    for key, text in texts.items():
        pool.step(key, say(text))
    replies = collect(pool)
    assert set(replies) == set(texts)
    return replies


def contents(replies: Iterable[WorldReply]) -> list[str | None]:
    """What each reply says, in order."""
    return [None if r.observation is None else r.observation.messages[-1]["content"] for r in replies]
