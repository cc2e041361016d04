"""The processes in which an environment runs: one that serves tasks, and `workers` that serve rewards.

Invariants
* User code runs in worker processes only, one request at a time in each, and each request has a deadline.
* A request that raises, takes too long or kills its worker fails alone: the worker is replaced and the
  others go on.
* A submitted reward gets exactly one reply unless it is cancelled. A failure is never a reward.
* `close` leaves no process behind; nor does the death of this process.

One thread of this process owns the workers; what it shares with the callers is guarded by `_changed`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_readable
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from headrace.environments.messages import (
    Done,
    Failed,
    GetTask,
    Progress,
    Ready,
    Request,
    Reward,
    Setup,
    TakeTestTasks,
)
from headrace.environments.process import WorkerProcess
from headrace.errors import EnvironmentFailure, EnvironmentSetupError, RunError

if TYPE_CHECKING:
    from headrace.config import EnvironmentConfig

PREFETCH = 32
"""Train tasks read ahead of the last one asked for."""

SETUP_TIMEOUT_S = 300.0
"""How long an environment's import and constructor may take."""

MAX_FAILED_STARTS = 3
"""Failed starts of one worker, in a row, that end the run."""

_TICK_S = 0.5
_CLOSE_TIMEOUT_S = 0.8


@dataclass(frozen=True, slots=True)
class RewardReply:
    """The answer to one `submit`: a reward, or one line that says why there is none."""

    key: Hashable
    reward: float | None
    error: str | None


@dataclass(slots=True)
class _Job:
    """A request and whom to tell its outcome: `finish(value, error)`, one of which is None."""

    request: Request
    finish: Callable[[Any, str | None], None]


@dataclass(slots=True)
class _Slot:
    """A place for one worker process; only the pool's thread touches it."""

    name: str
    process: WorkerProcess
    deadline: float
    ready: bool = False
    job: _Job | None = None
    failed_starts: int = 0


class EnvironmentPool:
    """Tasks and rewards of one environment, out of worker processes.

    Args:
        config: the environment's name, options, number of reward workers and timeout.
        seed: shuffles the train tasks.
        output: where what the user's code prints goes (a file or descriptor); standard error by default.

    Use it as a context manager, or call `start` and `close`, from one thread. Every method raises RunError
    once a worker failed to start `MAX_FAILED_STARTS` times in a row.
    """

    def __init__(self, config: EnvironmentConfig, seed: int, output: int | IO[Any] | None = None) -> None:
        self._config = config
        self._setup = Setup(config.name, dict(config.options), seed, config.timeout_s)
        self._output = output
        self._changed = threading.Condition()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread: threading.Thread | None = None
        self._slots: list[_Slot] = []
        self._closing = False
        self._num_ready = 0
        self._fatal: Exception | None = None
        # Rewards: a key is in `_submitted`, with its request and time, until its reply is handed out.
        self._queue: deque[tuple[Hashable, Reward]] = deque()
        self._submitted: dict[Hashable, tuple[Reward, float]] = {}
        self._replies: deque[RewardReply] = deque()
        # Tasks: outcomes are (value, error); the window is what train tasks to have ready.
        self._outcomes: dict[Request, tuple[Any, str | None]] = {}
        self._window = range(0)
        self._wanted_test: TakeTestTasks | None = None

    # Life

    def start(self) -> None:
        """Build the environment in every worker.

        Raises:
            EnvironmentSetupError: it cannot be built.
        """
        assert self._thread is None, "a pool starts once"
        self._thread = threading.Thread(target=self._run, name="environment pool", daemon=True)
        self._thread.start()
        try:
            with self._changed:
                self._wait_for(lambda: self._num_ready > self._config.workers)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill every worker, within a second. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        for slot in self._slots:
            slot.process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Tasks

    def check(self, sample_completion: str = "", test_tasks: int = 0) -> dict[str, Any]:
        """The first train task, once it is known that it can be read and rewarded.

        Args:
            sample_completion: what to try `reward` on.
            test_tasks: how many held-out tasks to read as well.

        Raises:
            EnvironmentSetupError: which method failed, and how.
        """
        task: dict[str, Any]
        task, error = self._outcome(GetTask(0))
        if error is None and test_tasks:
            _, error = self._outcome(TakeTestTasks(test_tasks))
        if error is None:
            key = object()
            self.submit(key, task, sample_completion)
            with self._changed:
                self._wait_for(lambda: any(reply.key is key for reply in self._replies))
                reply = next(reply for reply in self._replies if reply.key is key)
                self._replies.remove(reply)
                del self._submitted[key]
            error = reply.error and f"{reply.error}, on the first task and completion {sample_completion!r}"
        if error is not None:
            raise EnvironmentSetupError(f"environment {self._config.name}: {error}")
        return task

    def train_task(self, index: int) -> dict[str, Any]:
        """The train task at place `index`; those that follow are read ahead.

        Raises:
            EnvironmentFailure: the environment raised, gave no valid task, or none in time.
        """
        task: dict[str, Any] = self._value(GetTask(index))
        return task

    def test_tasks(self, count: int) -> list[dict[str, Any]]:
        """The first `count` held-out tasks, or all where there are fewer. Raises as `train_task` does."""
        tasks: list[dict[str, Any]] = self._value(TakeTestTasks(count)) if count > 0 else []
        return tasks

    # Rewards

    def submit(self, key: Hashable, task: dict[str, Any], completion: str) -> None:
        """Queue a reward; its reply will carry `key`, which must not be pending."""
        with self._changed:
            self._raise_if_over()
            if key in self._submitted:
                raise ValueError(f"a reward for {key!r} is already pending")
            request = Reward(task, completion)
            self._submitted[key] = (request, time.monotonic())
            self._queue.append((key, request))
        self._wake()

    def cancel(self, key: Hashable) -> None:
        """Give up a reward: its reply is never handed out. One that runs already still has its deadline."""
        with self._changed:
            self._submitted.pop(key, None)
            self._queue = deque(item for item in self._queue if item[0] != key)
            self._replies = deque(reply for reply in self._replies if reply.key != key)

    def poll(self) -> list[RewardReply]:
        """The replies that have come in since the last time; does not wait."""
        with self._changed:
            replies = self._hand_out()
            if not replies:
                self._raise_if_over()
            return replies

    def wait(self, timeout_s: float) -> list[RewardReply]:
        """The replies that have come in, after waiting for the first one.

        Empty after `timeout_s` seconds, or at once if none is pending.
        """
        with self._changed:
            self._wait_for(lambda: bool(self._replies) or not self._submitted, timeout_s)
            return self._hand_out()

    @property
    def pending(self) -> int:
        """Rewards submitted whose replies were not handed out yet."""
        with self._changed:
            return len(self._submitted)

    @property
    def oldest_pending_s(self) -> float:
        """Seconds since the oldest pending reward was submitted; 0 if there is none."""
        with self._changed:
            return max((time.monotonic() - since for _, since in self._submitted.values()), default=0.0)

    # What callers share; `_changed` is held

    def _hand_out(self) -> list[RewardReply]:
        replies = list(self._replies)
        self._replies.clear()
        for reply in replies:
            del self._submitted[reply.key]
        return replies

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closing or self._thread is None:
            raise RunError("the environment pool is not running")

    def _wait_for(self, done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `done()`. Without a timeout the deadlines of the workers' requests bound the wait."""
        self._changed.wait_for(
            lambda: done() or self._closing or self._fatal is not None or self._thread is None, timeout_s
        )
        if not done():
            self._raise_if_over()

    def _value(self, request: GetTask | TakeTestTasks) -> Any:
        value, error = self._outcome(request)
        if error is not None:
            raise EnvironmentFailure(f"environment {self._config.name}: {error}")
        return value

    def _outcome(self, request: GetTask | TakeTestTasks) -> tuple[Any, str | None]:
        with self._changed:
            self._raise_if_over()
            if isinstance(request, GetTask):
                self._window = range(request.index, request.index + 1 + PREFETCH)
                self._outcomes = {
                    known: outcome
                    for known, outcome in self._outcomes.items()
                    if not isinstance(known, GetTask) or known.index in self._window
                }
            else:
                self._wanted_test = request
            self._wake()
            self._wait_for(lambda: request in self._outcomes)
            value, error = self._outcomes[request]
            if error is not None or isinstance(request, TakeTestTasks):
                del self._outcomes[request]
            if error is not None:
                self._window = range(0)  # do not run into the same failure unasked
            return value, error

    def _wake(self) -> None:
        # A full buffer means that the thread is about to wake anyway; a closed one, that it is gone.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"x")

    # The thread that owns the workers

    def _run(self) -> None:
        try:
            for number in range(1 + self._config.workers):
                name = f"reward worker {number}" if number else "task worker"
                self._slots.append(_Slot(name, self._spawn(), time.monotonic() + SETUP_TIMEOUT_S))
            while True:
                with self._changed:
                    if self._closing or self._fatal is not None:
                        return
                for slot in self._slots:
                    self._dispatch(slot)
                self._wait_and_receive()
                now = time.monotonic()
                for slot in self._slots:
                    self._check(slot, now)
        except Exception as error:  # callers wait for this thread: whatever ends it must reach them
            self._end(RunError(f"the environment pool failed: {type(error).__name__}: {error}"))
        finally:
            for slot in self._slots:
                slot.process.kill()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _spawn(self) -> WorkerProcess:
        return WorkerProcess(self._setup, self._output)

    def _dispatch(self, slot: _Slot) -> None:
        if not slot.ready or slot.job is not None:
            return
        if slot.process.exited:  # before a request is spent on it
            self._lost(slot)
            return
        slot.job = self._next_task_job() if slot is self._slots[0] else self._next_reward_job()
        if slot.job is not None:
            slot.deadline = time.monotonic() + self._config.timeout_s
            try:
                slot.process.connection.send(slot.job.request)
            except OSError:
                self._lost(slot)

    def _next_reward_job(self) -> _Job | None:
        with self._changed:
            if not self._queue:
                return None
            key, request = self._queue.popleft()

        def finish(value: Any, error: str | None) -> None:
            submitted = self._submitted.get(key)
            if submitted is not None and submitted[0] is request:  # else it was cancelled meanwhile
                self._replies.append(RewardReply(key, value, error))

        return _Job(request, finish)

    def _next_task_job(self) -> _Job | None:
        with self._changed:
            request: GetTask | TakeTestTasks | None = self._wanted_test
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
            if isinstance(wanted, TakeTestTasks) or wanted.index in self._window:
                self._outcomes[wanted] = (value, error)

        return _Job(wanted, finish)

    def _wait_and_receive(self) -> None:
        deadlines = [slot.deadline for slot in self._slots if slot.job is not None or not slot.ready]
        timeout = min([_TICK_S, *(deadline - time.monotonic() for deadline in deadlines)])
        connections = {slot.process.connection: slot for slot in self._slots}
        ready = wait_readable([self._wake_receiver, *connections], max(0.0, timeout))
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        for connection, slot in connections.items():
            if connection in ready:
                self._receive(slot)

    def _receive(self, slot: _Slot) -> None:
        try:
            message = slot.process.connection.recv()
        except (EOFError, OSError):
            self._lost(slot)
            return
        match message:
            case Ready():
                slot.ready = True
                slot.failed_starts = 0
                with self._changed:
                    self._num_ready += 1
                    self._changed.notify_all()
            case Progress():
                slot.deadline = time.monotonic() + self._config.timeout_s
            case Done(value):
                self._finish(slot, value, None)
            case Failed(error) if slot.ready:
                self._finish(slot, None, error)
            case Failed(error):
                self._failed_start(slot, error)

    def _check(self, slot: _Slot, now: float) -> None:
        """Replace a worker that died without a word or passed its deadline."""
        if slot.process.connection.poll():
            return  # it has just spoken
        if slot.process.exited:
            self._lost(slot)
        elif now >= slot.deadline and slot.job is not None:
            limit = f"{self._config.timeout_s:g} s (environment.timeout_s)"
            error = f"{slot.job.request} gave nothing within {limit}; its worker was killed"
            self._finish(slot, None, error)
            self._replace(slot)
        elif now >= slot.deadline and not slot.ready:
            self._failed_start(slot, f"building the environment took longer than {SETUP_TIMEOUT_S:g} s")

    def _lost(self, slot: _Slot) -> None:
        """The worker died, in the middle of something or not."""
        how = slot.process.describe_exit()
        if slot.job is not None:
            self._finish(slot, None, f"{slot.job.request} ended its worker, which {how}")
            self._replace(slot)
        else:
            doing = "idle" if slot.ready else "building the environment"
            self._failed_start(slot, f"the worker {how} while {doing}")

    def _finish(self, slot: _Slot, value: Any, error: str | None) -> None:
        job, slot.job = slot.job, None
        assert job is not None
        slot.failed_starts = 0
        with self._changed:
            job.finish(value, error)
            self._changed.notify_all()

    def _failed_start(self, slot: _Slot, error: str) -> None:
        slot.failed_starts += 1
        started = self._num_ready >= len(self._slots)
        if not started:
            if (self._config.name.rpartition(":")[0] or self._config.name) not in error:
                error = f"environment {self._config.name}: {error}"
            self._end(EnvironmentSetupError(error))
        elif slot.failed_starts >= MAX_FAILED_STARTS:
            times = f"{slot.failed_starts} times in a row"
            self._end(
                RunError(f"environment {self._config.name}: the {slot.name} failed to start {times}; {error}")
            )
        else:
            self._replace(slot)

    def _replace(self, slot: _Slot) -> None:
        slot.process.kill()
        slot.process = self._spawn()
        slot.ready = False
        slot.deadline = time.monotonic() + SETUP_TIMEOUT_S

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()
