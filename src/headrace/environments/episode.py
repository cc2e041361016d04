"""One episode as the parent process knows it, and the clock that says how long its world has taken.

Invariant: the clock runs while something is asked of the episode and its instance stands in a worker: not before the
call of `reset` (or of what puts a lost episode back) has begun there. So it runs neither while the episode waits for
a place, nor while the worker that held it is replaced, nor while the policy writes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from headrace.environments.base import Action, Step


@dataclass(slots=True, eq=False)
class Episode:
    """One episode. Times are those of `time.monotonic`.

    Attributes:
        number: its name in the messages to workers; no other episode of the pool ever has it.
        key: its name in the caller's requests and replies.
        actions: every action that was asked for, in order.
        steps: what its world answered: to `reset`, then to each action.
        snapshot: what `snapshot()` returned after the last of `steps`.
        asked: whether a request was made that has no reply yet: the last of `actions` or, without any, the reset.
        used_s: seconds that its world has taken, up to when the clock last stopped.
        known: whether the process that holds it was sent anything about it.
        up_to_date: whether its instance there has answered all of `steps`; else it must be put back first.
        over: whether nothing is asked of it or told about it any more. Its place is free once the worker has closed it.
        failure: why it cannot go on. It is the reply to the next request, as nothing was asked when it failed.
        moves: how often it has lost its worker since its world last answered.
    """

    number: int
    key: Hashable
    task: dict[str, Any]
    actions: list[Action] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    snapshot: Any = None
    asked: bool = False
    used_s: float = 0.0
    known: bool = False
    up_to_date: bool = True
    over: bool = False
    failure: str | None = None
    moves: int = 0
    _in_worker: bool = False
    _running_since: float | None = None
    _used_before_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether its instance, if there is one, is to be closed."""
        return self.over or self.failure is not None

    def ask(self, now: float) -> None:
        """A request is made."""
        self.asked = True
        self._used_before_s = self.used_s
        self._start_clock(now)

    def enter_worker(self, now: float) -> None:
        """The first call of a method of its instance has begun in the process that holds it."""
        self._in_worker = True
        self._start_clock(now)

    def lose_worker(self, now: float) -> None:
        """The process that held it is gone."""
        self._stop_clock(now)
        self._in_worker = self.known = False

    def reply(self, now: float) -> float:
        """The request gets its reply. Returns the seconds that its world took for it."""
        self._stop_clock(now)
        self.asked = False
        return self.used_s - self._used_before_s

    def late_at(self, limit_s: float) -> float:
        """When its world will have taken `limit_s` seconds in all; infinite while the clock stands still."""
        return math.inf if self._running_since is None else self._running_since + limit_s - self.used_s

    def _start_clock(self, now: float) -> None:
        if self.asked and self._in_worker and self._running_since is None:
            self._running_since = now

    def _stop_clock(self, now: float) -> None:
        if self._running_since is not None:
            self.used_s += now - self._running_since
            self._running_since = None
