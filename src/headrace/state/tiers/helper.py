"""A thread that does one thing after the other, for somebody who will not wait for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Job:
    """Something handed to a helper. `result` or `error` is set when `wait` says so."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._done = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was done within the time."""
        return self._done.wait(timeout_s)

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error
        self._work = lambda: None  # what it holds may be large
        self._done.set()


class Helper:
    """A daemon thread that starts with its first job: a job that hangs does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Any]) -> Job:
        job = Job(work)
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return job

    def stop(self) -> None:
        """End after the jobs that were handed over."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
