"""Which tasks are wanted, and what the task worker made of them.

Invariants
* Train tasks are read ahead of the last one asked for, at most `PREFETCH` of them, and never past one that failed.
* A failure is told once and then forgotten, so that the task can be asked for again.

`changed` guards all of this, and is held by whoever calls.
"""

from __future__ import annotations

from typing import Any

from headrace.environments.jobs import Job
from headrace.environments.messages import GetTask, GetTestTasks

PREFETCH = 32
"""Train tasks read ahead of the last one asked for."""


class WantedTasks:
    """Tasks on their way from the task worker to those who ask."""

    def __init__(self) -> None:
        self._outcomes: dict[GetTask | GetTestTasks, tuple[Any, str | None]] = {}
        self._window = range(0)
        self._wanted_test: GetTestTasks | None = None

    def want(self, request: GetTask | GetTestTasks) -> None:
        """Have this read, if it is not there yet."""
        if isinstance(request, GetTestTasks):
            self._wanted_test = request
            return
        self._window = range(request.index, request.index + 1 + PREFETCH)
        self._outcomes = {
            known: outcome
            for known, outcome in self._outcomes.items()
            if not isinstance(known, GetTask) or known.index in self._window
        }

    def has(self, request: GetTask | GetTestTasks) -> bool:
        return request in self._outcomes

    def pop_outcome(self, request: GetTask | GetTestTasks) -> tuple[Any, str | None]:
        """(value, error) of what `has` says is there; one of them is None. A failure is forgotten with this."""
        value, error = self._outcomes[request]
        if error is not None or isinstance(request, GetTestTasks):
            del self._outcomes[request]
        if error is not None:
            self._window = range(0)  # do not run into the same failure unasked
        return value, error

    def next_job(self) -> Job | None:
        """What the task worker should do now."""
        request: GetTask | GetTestTasks | None = self._wanted_test
        self._wanted_test = None
        for index in self._window if request is None else ():
            value, error = self._outcomes.get(GetTask(index), (None, None))
            if value is None:
                # Behind a failed task lies nothing to read ahead.
                request = GetTask(index) if error is None else None
                break
        if request is None:
            return None
        wanted = request

        def finish(value: Any, error: str | None) -> None:
            if isinstance(wanted, GetTestTasks) or wanted.index in self._window:
                self._outcomes[wanted] = (value, error)

        return Job(wanted, finish)
