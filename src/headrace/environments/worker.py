"""The process in which user code runs: `python -m headrace.environments.worker FD`.

Invariants
* It serves tasks or rewards one at a time over the socket FD, or many live episodes; and nothing the user prints
  gets onto that socket: standard output goes to standard error.
* It alone speaks on that socket: a copy of it that user code forked, and let go on, ends instead of speaking.
* The text of an error that it sends can be encoded in UTF-8.
* It ends, with everything it started in its process group, as soon as the parent dies or closes its end of
  the socket. If user code holds the interpreter just then, it ends when its request's time is over.
* Ctrl-C belongs to the parent.
* It imports neither torch nor numpy nor the settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from headrace.environments.base import Caller, ConversationEnvironment, Environment, is_conversation
from headrace.environments.messages import (
    Closed,
    Done,
    Failed,
    GetTask,
    Progress,
    Ready,
    Refused,
    Reply,
    Request,
    Reward,
    Setup,
)
from headrace.environments.options import describe_exception
from headrace.environments.registry import environment_builder, environment_folder
from headrace.environments.task_stream import TaskStream
from headrace.environments.validation import validate_reward
from headrace.errors import EnvironmentSetupError

PROGRESS_EVERY_S = 0.05
SELF_DESTRUCT_AFTER_S = 10.0
"""How far past its deadline a request may get before the worker ends itself. A living parent is quicker."""

_PR_SET_PDEATHSIG = 1
_STRAY_COPY = b"headrace: ended a process that the environment forked and let go on; end it with os._exit\n"


class Server:
    """Answers requests for tasks and rewards with one environment."""

    def __init__(
        self,
        environment: Environment | ConversationEnvironment,
        setup: Setup,
        send: Callable[[Reply], None],
    ) -> None:
        self._environment: Any = environment
        self._folder = environment_folder(setup.name)
        self._timeout_s = setup.timeout_s
        self._send = send
        self._caller = Caller()
        self._last_progress = 0.0
        self._train, self._test = (
            TaskStream(environment, split, setup.seed, self._caller, self._on_read)
            for split in ("train", "test")
        )

    def answer(self, request: Request) -> Reply:
        _self_destruct_in(self._timeout_s)
        try:
            return Done(self._serve(request))
        except EnvironmentSetupError as error:
            return Failed(str(error))
        except (
            BaseException
        ) as error:  # nothing that user code raises may end the worker, SystemExit included
            return Failed(f"{request} raised {describe_exception(error, self._folder)}")
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _serve(self, request: Request) -> Any:
        if isinstance(request, Reward):
            return validate_reward(
                self._caller.call(self._environment.reward, request.task, request.completion)
            )
        if isinstance(request, GetTask):
            return self._train.get(request.index)
        return self._test.first(request.count)

    def _on_read(self, count: int) -> None:
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_EVERY_S:
            self._last_progress = now
            _self_destruct_in(self._timeout_s)
            self._send(Progress(count))


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # Not SIGKILL: that would leave behind what user code started.
        signal.signal(signal.SIGRTMAX, lambda *_: _end_process_group())
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGRTMAX)
    os.set_inheritable(fd, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    connection = Connection(fd)
    send = _make_send(connection)
    inbox = Inbox()
    threading.Thread(target=_receive, args=(connection, inbox), name="parent", daemon=True).start()

    setup: Setup = inbox.get()
    random.seed(setup.seed)
    try:
        build = environment_builder(setup.name, setup.options)
        environment = build()
    except EnvironmentSetupError as error:
        send(Failed(str(error)))
        return
    except BaseException as error:
        folder = environment_folder(setup.name)
        send(Failed(f"building {setup.name} raised {describe_exception(error, folder)}"))
        return
    multi_turn = is_conversation(environment)
    send(Ready(multi_turn))
    if multi_turn and setup.holds_episodes:
        built = [environment]
        _hold_episodes(lambda: built.pop() if built else build(), setup, send, inbox)
    server = Server(environment, setup, send)
    while True:
        send(server.answer(inbox.get()))


def _make_send(connection: Connection) -> Callable[[Reply], None]:
    """What sends a message to the parent, its error's text made encodable: lone surrogates become `\\ud800`.

    It ends any other process that calls it: one that user code forked shares the socket, and where it goes on it
    would answer a second time.
    """
    own = os.getpid()

    def send(message: Reply) -> None:
        if os.getpid() != own:
            with contextlib.suppress(OSError):
                os.write(2, _STRAY_COPY)
            os._exit(1)
        if isinstance(message, Failed | Refused | Closed) and message.error is not None:
            text = message.error.encode("utf-8", "backslashreplace").decode("utf-8")
            message = replace(message, error=text)
        connection.send(message)

    return send


def _hold_episodes(
    build: Callable[[], Any], setup: Setup, send: Callable[[Reply], None], inbox: Inbox
) -> NoReturn:
    import asyncio  # not at the top: it would slow the start of workers that need no loop

    from headrace.environments.world_server import WorldServer

    def watch(calling: bool) -> None:
        if calling:
            _self_destruct_in(setup.timeout_s)
        else:
            faulthandler.cancel_dump_traceback_later()

    async def serve() -> NoReturn:
        folder = environment_folder(setup.name)
        server = WorldServer(build, folder, setup.timeout_s, send, watch)
        loop = asyncio.get_running_loop()
        inbox.deliver_to(lambda item: loop.call_soon_threadsafe(server.on_request, item))
        await asyncio.Future()  # the end of the connection ends the process
        raise AssertionError

    asyncio.run(serve())
    raise AssertionError


class Inbox:
    """What the parent has sent, in order: `get` waits for the next item, until `deliver_to` hands all to a function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._put: Callable[[Any], object] = self._items.put

    def put(self, item: Any) -> None:
        with self._lock:
            self._put(item)

    def get(self) -> Any:
        return self._items.get()

    def deliver_to(self, function: Callable[[Any], object]) -> None:
        with self._lock:
            while not self._items.empty():
                function(self._items.get())
            self._put = function


def _receive(connection: Connection, inbox: Inbox) -> None:
    """Put what the parent sends into the inbox; when its end of the connection closes, end this process group."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        _end_process_group()


def _end_process_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _self_destruct_in(seconds: float) -> None:
    """End this process `SELF_DESTRUCT_AFTER_S` past `seconds`, unless the timer is cancelled or set again.

    The timer is a C thread, which needs no interpreter lock.
    """
    faulthandler.dump_traceback_later(seconds + SELF_DESTRUCT_AFTER_S, exit=True, file=2)


if __name__ == "__main__":
    main(int(sys.argv[1]))
