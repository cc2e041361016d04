"""What a worker process and its parent say to each other, pickled over one socket.

The parent sends `Setup` once; the worker answers with `Ready` or `Failed`. Then

* a worker that serves tasks or rewards gets one request at a time and answers it with any number of `Progress`
  and then `Done` or `Failed`;
* a worker that holds episodes gets `Reset`, `Act`, `Restore` and `Close` for any of them, one at a time for each.
  It says `Began` whenever it calls a method of the user's, and answers the first three with `Answered` or `Refused`.
  Each episode ends with exactly one `Closed`: after a `Close`, after a step that was the last one, and after `Refused`.

All of it is plain data, so that the parent never imports a user's module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.environments.base import Action, Step


@dataclass(frozen=True, slots=True)
class Setup:
    """Build this environment.

    Args:
        seed: shuffles its train tasks.
        timeout_s: how long one request, or one call of an episode's method, may take.
        holds_episodes: whether the worker holds live episodes if the environment has the conversation form.
    """

    name: str
    options: dict[str, Any]
    seed: int
    timeout_s: float
    holds_episodes: bool = False


@dataclass(frozen=True, slots=True)
class GetTask:
    """The train task at a place -> dict."""

    index: int

    def __str__(self) -> str:
        return f"tasks('train') for task {self.index}"


@dataclass(frozen=True, slots=True)
class GetTestTasks:
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


Request = GetTask | GetTestTasks | Reward


@dataclass(frozen=True, slots=True)
class Reset:
    """Begin an episode in a new instance."""

    episode: int
    task: dict[str, Any]

    def __str__(self) -> str:
        return "reset(task)"


@dataclass(frozen=True, slots=True)
class Act:
    """Answer the policy's next turn."""

    episode: int
    action: Action

    def __str__(self) -> str:
        return "step(action)"


@dataclass(frozen=True, slots=True)
class Restore:
    """Put a new instance where the episode's lost one stood.

    If there is a `snapshot` and the class has `restore`, that does it. Else the instance is reset and told `actions`
    again, and must answer as recorded in `steps`: first to `reset`, then to each action.
    """

    episode: int
    task: dict[str, Any]
    actions: list[Action]
    steps: list[Step]
    snapshot: Any

    def __str__(self) -> str:
        return "putting a lost episode back in its place"


@dataclass(frozen=True, slots=True)
class Close:
    """Cancel what an episode is doing, if anything, and close its instance."""

    episode: int


EpisodeRequest = Reset | Act | Restore | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment is built; whether it has the conversation form."""

    multi_turn: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """The request goes on: `count` tasks were read so far."""

    count: int


@dataclass(frozen=True, slots=True)
class Done:
    """What the request has given."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The setup or the request failed; `error` is one line."""

    error: str


@dataclass(frozen=True, slots=True)
class Began:
    """A method of the episode's instance is about to be called."""

    episode: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of an episode succeeded.

    Args:
        step: what its world answered; None for `Restore`.
        snapshot: what `snapshot()` returned after that, if the class has it.
    """

    episode: int
    step: Step | None
    snapshot: Any = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request of an episode failed, and so has the episode; `error` is one line."""

    episode: int
    error: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The episode's instance is gone; `error` says how its `close` failed."""

    episode: int
    error: str | None


Reply = Ready | Progress | Done | Failed | Began | Answered | Refused | Closed
