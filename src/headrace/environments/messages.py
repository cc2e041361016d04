"""What a worker process and its parent say to each other, pickled over one socket.

The parent sends `Setup` once and then one request at a time. The worker answers the setup with `Ready` or
`Failed`, and a request with any number of `Progress` and then `Done` or `Failed`. All of it is plain data, so
that the parent never imports a user's module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setup:
    """Build this environment; `seed` shuffles its tasks, and no request takes longer than `timeout_s`."""

    name: str
    options: dict[str, Any]
    seed: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GetTask:
    """The train task at a place -> dict."""

    index: int

    def __str__(self) -> str:
        return f"tasks('train') for task {self.index}"


@dataclass(frozen=True, slots=True)
class TakeTestTasks:
    """The first tasks of "test" -> list of dicts."""

    count: int

    def __str__(self) -> str:
        return f"tasks('test') for {self.count} tasks"


@dataclass(frozen=True, slots=True)
class Reward:
    """What a completion of a task is worth -> float."""

    task: dict[str, Any]
    completion: str

    def __str__(self) -> str:
        return "reward(task, completion)"


Request = GetTask | TakeTestTasks | Reward


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment is built."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The request goes on: `count` tasks were read so far."""

    count: int


@dataclass(frozen=True, slots=True)
class Done:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The setup or the request failed; `error` is one line."""

    error: str


Reply = Ready | Progress | Done | Failed
