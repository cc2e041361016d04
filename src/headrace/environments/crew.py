"""The worker processes of one environment, and the thread that owns them.

Invariants
* A worker that dies, is silent past the deadline of its work, or sends what cannot be read, is replaced. Its `Work` is
  told, and settles what that worker was doing; nothing else is touched.
* A message that answers nothing that was asked is dropped. The first one is reported.
* An environment that cannot be built at first, or a worker that fails to start `MAX_FAILED_STARTS` times in a row,
  ends the crew with an error.
* `close` leaves no process behind; nor does the death of this process.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_readable
from typing import IO, Any, Protocol

from headrace.environments.messages import Failed, Ready, Reply, Setup
from headrace.environments.process import WorkerProcess
from headrace.errors import EnvironmentSetupError, RunError

SETUP_TIMEOUT_S = 300.0
"""How long an environment's import and constructor may take."""

MAX_FAILED_STARTS = 3
"""Failed starts of one worker, in a row, that end the run."""

_TICK_S = 0.5
_CLOSE_TIMEOUT_S = 0.8


class Work(Protocol):
    """What one worker is to do. It outlives the process: the one that replaces it goes on with the same work.

    Only the crew's thread calls this. Times are those of `time.monotonic`.
    """

    deadline: float
    """When the worker will have been silent for too long; infinite if it has nothing to do."""

    def next_requests(self, now: float) -> Sequence[Any]:
        """What to send to the worker now; counts as sent."""
        ...

    def on_message(self, message: Reply, now: float) -> bool:
        """The worker said something. Returns whether it was asked for; if not, nothing has changed."""
        ...

    def on_lost(self, how: str | None) -> bool:
        """The worker is gone: `how` it ended, or None if it was killed at its deadline.

        Returns whether it was at work, so that its end may be the work's fault.
        """
        ...


@dataclass(slots=True)
class _Slot:
    """One worker: the process that stands for it now, and its work once a process of it has been ready.

    Only the crew's thread touches it.

    Attributes:
        deadline: when the process must be ready.
        failed_starts: processes that ended before they did any work, in a row.
    """

    index: int
    process: WorkerProcess
    deadline: float
    work: Work | None = None
    ready: bool = False
    failed_starts: int = 0


class Crew:
    """Starts workers, sends them their requests, watches and replaces them.

    Args:
        setups: one per worker.
        make_work: makes the work of worker i, told whether the environment has the conversation form.
        before_sending: called before requests are sent out; returns when to call it again at the latest.
        on_started: called once every worker was ready.
        on_error: called with what ends the crew.
        report: called with a line about what went wrong and cost no attempt.
        output: where what the user's code prints goes; standard error by default.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        make_work: Callable[[int, bool], Work],
        before_sending: Callable[[float], float],
        on_started: Callable[[bool], None],
        on_error: Callable[[Exception], None],
        report: Callable[[str], None],
        output: int | IO[Any] | None,
    ) -> None:
        self._setups = setups
        self._make_work = make_work
        self._before_sending = before_sending
        self._on_started = on_started
        self._on_error = on_error
        self._report = report
        self._told_of_strays = False
        self._output = output
        self._slots: list[_Slot] = []
        self._multi_turn: bool | None = None
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="environment workers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look for requests to send: there may be new ones."""
        # A full buffer means that the thread is about to wake anyway; a closed one, that it is gone.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_sender.send(b"x")

    def close(self) -> None:
        """Kill every worker, within a second. Idempotent."""
        self._closing = True
        self.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        for slot in self._slots:
            slot.process.kill()

    def _run(self) -> None:
        try:
            for index, setup in enumerate(self._setups):
                process = WorkerProcess(setup, self._output)
                self._slots.append(_Slot(index, process, time.monotonic() + SETUP_TIMEOUT_S))
            while not self._closing:
                again_at = self._before_sending(time.monotonic())
                for slot in self._slots:
                    self._send_requests(slot)
                self._wait_and_receive(again_at)
                for slot in self._slots:
                    self._replace_if_dead_or_late(slot, time.monotonic())
        except Exception as error:  # callers wait for this thread: whatever ends it must reach them
            self._stop_with(RunError(f"the environment pool failed: {type(error).__name__}: {error}"))
        finally:
            for slot in self._slots:
                slot.process.kill()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _send_requests(self, slot: _Slot) -> None:
        if not slot.ready or slot.process.exited:  # spend no request on a dead one: it is replaced below
            return
        assert slot.work is not None
        try:
            for request in slot.work.next_requests(time.monotonic()):
                slot.process.connection.send(request)
        except OSError:
            self._on_gone(slot)

    def _wait_and_receive(self, again_at: float) -> None:
        deadlines = [again_at, *(self._deadline(slot) for slot in self._slots)]
        timeout = min(_TICK_S, *(deadline - time.monotonic() for deadline in deadlines))
        connections = {slot.process.connection: slot for slot in self._slots}
        ready = wait_readable([self._wake_receiver, *connections], max(0.0, timeout))
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        for connection, slot in connections.items():
            if connection in ready:
                self._receive(slot)

    def _deadline(self, slot: _Slot) -> float:
        return slot.work.deadline if slot.ready and slot.work is not None else slot.deadline

    def _receive(self, slot: _Slot) -> None:
        try:
            message = slot.process.connection.recv()
        except (EOFError, OSError):
            self._on_gone(slot)
            return
        except Exception:  # user code has written to the socket: unpickling that may raise anything
            slot.process.kill()
            self._on_gone(slot, "sent what cannot be read, and was killed")
            return
        if slot.ready:
            self._deliver(slot, message)
        elif isinstance(message, Ready):
            self._on_ready(slot, message.multi_turn)
        elif isinstance(message, Failed):
            self._on_failed_start(slot, message.error)
        else:
            self._report_stray(message)

    def _deliver(self, slot: _Slot, message: Reply) -> None:
        assert slot.work is not None
        if slot.work.on_message(message, time.monotonic()):
            slot.failed_starts = 0
        else:
            self._report_stray(message)

    def _report_stray(self, message: object) -> None:
        if not self._told_of_strays:
            self._told_of_strays = True
            self._report(
                f"a worker sent an answer ({type(message).__name__}) to nothing that it was asked; such answers are "
                "dropped, and this is told once. If the environment forks, end the child with os._exit"
            )

    def _on_ready(self, slot: _Slot, multi_turn: bool) -> None:
        if self._multi_turn is None:
            self._multi_turn = multi_turn
        elif multi_turn != self._multi_turn:
            self._stop_with(
                RunError(f"environment {self._name}: its class has changed its form while it was used")
            )
            return
        slot.ready = True
        slot.failed_starts = 0
        if slot.work is None:
            slot.work = self._make_work(slot.index, multi_turn)
            if all(slot.work is not None for slot in self._slots):
                self._on_started(multi_turn)

    def _replace_if_dead_or_late(self, slot: _Slot, now: float) -> None:
        """Replace a worker that died without a word or passed its deadline."""
        if slot.process.connection.poll():
            return  # it has just spoken
        if slot.process.exited:
            self._on_gone(slot)
        elif now < self._deadline(slot):
            return
        elif slot.ready:
            assert slot.work is not None
            slot.process.kill()
            slot.work.on_lost(None)
            self._replace(slot)
        else:
            self._on_failed_start(slot, f"building the environment took longer than {SETUP_TIMEOUT_S:g} s")

    def _on_gone(self, slot: _Slot, how: str | None = None) -> None:
        """The process died by itself or, if there is `how`, was killed for that."""
        if how is None:
            how = slot.process.describe_exit()
            if slot.ready:
                self._read_last_words(slot)
        if slot.ready and slot.work is not None and slot.work.on_lost(how):
            slot.failed_starts = 0
            self._replace(slot)
        else:
            doing = "idle" if slot.ready else "building the environment"
            self._on_failed_start(slot, f"the worker {how} while {doing}")

    def _read_last_words(self, slot: _Slot) -> None:
        """Deliver what a dead worker had still sent, which may say what it was doing when it died."""
        while True:
            try:
                if not slot.process.connection.poll():
                    return
                message = slot.process.connection.recv()
            except Exception:  # their end, or what cannot be read
                return
            self._deliver(slot, message)

    def _on_failed_start(self, slot: _Slot, error: str) -> None:
        slot.failed_starts += 1
        if any(slot.work is None for slot in self._slots):
            if (self._name.rpartition(":")[0] or self._name) not in error:
                error = f"environment {self._name}: {error}"
            self._stop_with(EnvironmentSetupError(error))
        elif slot.failed_starts >= MAX_FAILED_STARTS:
            times = f"{slot.failed_starts} times in a row"
            who = f"reward worker {slot.index}" if slot.index else "task worker"
            self._stop_with(RunError(f"environment {self._name}: the {who} failed to start {times}; {error}"))
        else:
            self._replace(slot)

    def _replace(self, slot: _Slot) -> None:
        slot.process.kill()
        slot.process = WorkerProcess(self._setups[slot.index], self._output)
        slot.ready = False
        slot.deadline = time.monotonic() + SETUP_TIMEOUT_S

    def _stop_with(self, error: Exception) -> None:
        self._closing = True
        self._on_error(error)

    @property
    def _name(self) -> str:
        return self._setups[0].name
