"""A small line on the tiny model, and an environment pool whose answers come when the test says so."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from headrace import Line, Observer
from headrace.config import Config
from headrace.environments import WorldReply


def settings(**sections: dict[str, Any]) -> Config:
    """Settings of a run that takes a second or two; sections override single keys."""
    data: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny-random"},
        "environment": {"name": "arithmetic"},
        "sampling": {"max_tokens": 5},
        "algorithm": {"group_size": 2},
        "trainer": {"learning_rate": 1e-3},
        "engine": {"max_sequences": 8, "context_length": 128},
        "line": {"groups_per_step": 2, "steps": 4, "decode_steps": 2, "threads": 1, "checkpoint_every": 1},
        "eval": {"tasks": 0},
    }
    for section, values in sections.items():
        data[section] = data[section] | values
    return Config.from_dict(data)


def environment_file(folder: Path, body: str, imports: str = "import random, time") -> str:
    """Write an environment class `World` with the given body and return its name for the settings."""
    path = folder / "world.py"
    path.write_text(f"{imports}\n\nclass World:\n{body}\n")
    return f"{path}:World"


def lines_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def check_books(run_dir: Path, config: Config) -> list[int]:
    """Assert what must hold of a complete run; returns the staleness of every trained token."""
    steps, groups = config.line.steps, config.line.groups_per_step
    metrics, trajectories = lines_of(run_dir, "metrics.jsonl"), lines_of(run_dir, "trajectories.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    consumed = [(t["group"], t["sample"], t["attempt"]) for t in trajectories]
    assert len(set(consumed)) == len(consumed), "a trajectory was trained twice"
    for step in range(1, steps + 1):
        assert len({t["group"] for t in trajectories if t["step"] == step}) == groups
    by_group: dict[int, set[int]] = {}
    for t in trajectories:
        by_group.setdefault(t["group"], set()).add(t["step"])
    assert all(len(used) == 1 for used in by_group.values()), "a group was consumed by two steps"
    ages = [
        t["step"] - 1 - version
        for t in trajectories
        for version, sampled in zip(t["versions"], t["sampled"], strict=True)
        if sampled
    ]
    assert min(ages) >= 0
    assert max(ages) <= config.line.max_staleness
    return ages


class Killed(BaseException):
    """The process died here."""


class KillAt(Observer):
    """Dies at the n-th unit of work."""

    def __init__(self, units: int) -> None:
        self.units = units

    def on_status(self, status: Any) -> None:
        self.units -= 1
        if self.units < 0:
            raise Killed


class Messages(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


class ChosenPool:
    """An environment pool in this process that answers in the order and at the times that `choose` picks.

    `choose(n)` returns which of n pending rewards to answer now, or None for none of them.
    """

    multi_turn = False
    free_places = None

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.requests: list[Hashable] = []

    def train_task(self, index: int) -> dict[str, Any]:
        return {"prompt": f"task {index}", "index": index}

    def submit(self, key: Hashable, task: dict[str, Any], completion: str) -> None:
        self.requests.append(key)

    def drop(self, key: Hashable) -> None:
        self.requests = [request for request in self.requests if request != key]

    def poll(self) -> list[WorldReply]:
        if not self.requests:
            return []
        index = self.choose(len(self.requests))
        return [] if index is None else [self._answer(index)]

    def wait(self, timeout_s: float) -> list[WorldReply]:
        index = self.choose(len(self.requests))
        if index is None and timeout_s < 1:
            return []
        return [self._answer(0 if index is None else index)]

    def take_reports(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def _answer(self, index: int) -> WorldReply:
        key = self.requests.pop(index)
        return WorldReply(key, float(sum(key) % 2), None)  # type: ignore[call-overload]


def finish(run_dir: Path) -> None:
    Line.resume(run_dir).run()
