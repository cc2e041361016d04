"""The work of a worker that serves one request at a time: tasks, or rewards of completions.

Invariant: a request gets exactly one outcome, whatever becomes of the worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Any

from headrace.environments.messages import Done, Failed, Progress, Reply, Request


@dataclass(slots=True)
class Job:
    """A request and whom to tell its outcome: `finish(value, error)`, one of which is None."""

    request: Request
    finish: Callable[[Any, str | None], None]


class Jobs:
    """One worker's jobs, one after another, each from `next_job`.

    `next_job` and `Job.finish` are called with `changed` held.
    """

    def __init__(self, next_job: Callable[[], Job | None], timeout_s: float, changed: Condition) -> None:
        self._next_job = next_job
        self._timeout_s = timeout_s
        self._changed = changed
        self._job: Job | None = None
        self.deadline = math.inf

    def next_requests(self, now: float) -> list[Request]:
        if self._job is not None:
            return []
        with self._changed:
            self._job = self._next_job()
        if self._job is None:
            return []
        self.deadline = now + self._timeout_s
        return [self._job.request]

    def on_message(self, message: Reply, now: float) -> bool:
        if self._job is None:
            return False
        match message:
            case Progress():
                self.deadline = now + self._timeout_s
            case Done(value):
                self._finish(value, None)
            case Failed(error):
                self._finish(None, error)
            case _:
                return False
        return True

    def on_lost(self, how: str | None) -> bool:
        if self._job is None:
            return False
        if how is None:
            limit = f"{self._timeout_s:g} s (environment.timeout_s)"
            error = f"{self._job.request} gave nothing within {limit}; its worker was killed"
        else:
            error = f"{self._job.request} ended its worker, which {how}"
        self._finish(None, error)
        return True

    def _finish(self, value: Any, error: str | None) -> None:
        job, self._job = self._job, None
        assert job is not None
        self.deadline = math.inf
        with self._changed:
            job.finish(value, error)
            self._changed.notify_all()
