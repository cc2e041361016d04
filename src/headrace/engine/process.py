"""The process that prefills for another one, seen from both sides: `PrefillProcess`, and what runs in it.

    python -m headrace.engine.process FD

Invariants
* It ends as soon as its parent dies or closes its end of the socket, after the chunk that it computes.
* Its KV lies in memory without a name: nothing is left when both processes are gone, however they ended.
* No send or receive blocks longer than `IO_TIMEOUT_S`; a process that is gone or does not answer raises `PrefillLost`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self

import torch

from headrace.config import EngineConfig
from headrace.engine.follow import WeightFollower, attach
from headrace.engine.prefill import Answer, Drop, Failed, Hello, Prefiller, Prompt
from headrace.errors import HeadraceError, RunError, UserError
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.machine import tune_allocator
from headrace.state.weights import WeightReader, content_digest

IO_TIMEOUT_S = 5
_IDLE_S = 0.02
_EXIT_WAIT_S = 2.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class PrefillLost(RunError):
    """The prefilling process is gone, or does not answer."""


class _Setup(NamedTuple):
    model: str
    dtype: str
    config: EngineConfig
    slots: int
    threads: int
    cores: tuple[int, ...]
    store: str | None
    weights_id: str | None


class PrefillProcess:
    """A started process that prefills, and the connection to it. `wait_ready` before its first use.

    Args:
        model: a folder, GGUF file, alias or hub id: the model of the engine that it works for.
        config: that engine's settings.
        dtype: the model's.
        slots: prompts that it can hold at once, each of up to `context_length` tokens.
        threads: CPU threads that it computes with.
        cores: CPU cores it is bound to; any, by default.
        store: a `WeightStore` whose weights it follows; the folder's weights by default.
        weights_id: what the folder's weights are called; by default the digest of their content.

    Raises:
        UserError: the model cannot be found.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str = "float32",
        slots: int = 4,
        threads: int = 1,
        cores: Sequence[int] = (),
        store: str | None = None,
        weights_id: str | None = None,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("prefilling in another process needs Linux")
        path = str(resolve(str(model)))
        setup = _Setup(path, dtype, config or EngineConfig(), slots, threads, tuple(cores), store, weights_id)
        ours, theirs = socket.socketpair()
        with theirs:
            # Not a multiprocessing spawn: that would import the user's __main__ again.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environ(threads),
                start_new_session=True,
            )
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", IO_TIMEOUT_S, 0))
        self._connection = Connection(ours.detach())
        self.hello: Hello | None = None
        self.memory = -1
        """Descriptor of the memory that its slots lie in, once it is ready."""
        with contextlib.suppress(OSError):  # it died at once: the end of its stream will say so
            self._connection.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def wait_ready(self, timeout_s: float = 120.0) -> Hello:
        """Wait until it has loaded the model.

        Raises:
            UserError: it cannot start; the line says why. The process is ended.
        """
        if self.hello is not None:
            return self.hello
        try:
            if not self._connection.poll(timeout_s):
                raise UserError(f"the prefilling process did not load its model within {timeout_s:g} s")
            message = self._connection.recv()
            if isinstance(message, Failed):
                raise UserError(f"the prefilling process cannot start: {message.reason}")
            with socket.socket(fileno=os.dup(self._connection.fileno())) as channel:
                _, (self.memory,), _, _ = socket.recv_fds(channel, 1, 1)
        except (EOFError, OSError, ValueError) as error:
            reason = self._describe_exit()
            self.close()
            raise UserError(f"the prefilling process cannot start: it {reason}") from error
        except UserError:
            self.close()
            raise
        self.hello = message
        return message

    def send(self, message: Prompt | Drop) -> None:
        """Raises `PrefillLost` if it is gone."""
        try:
            self._connection.send(message)
        except (OSError, ValueError) as error:
            raise PrefillLost(self._describe_exit()) from error

    def receive(self, timeout_s: float = 0.0) -> Iterator[Answer]:
        """What it has answered; waits for the first answer up to `timeout_s`. Raises `PrefillLost` if it is gone."""
        try:
            while self._connection.poll(timeout_s):
                yield self._connection.recv()
                timeout_s = 0.0
        except (EOFError, OSError) as error:
            raise PrefillLost(self._describe_exit()) from error
        except Exception as error:  # unpickling raises what it likes
            raise PrefillLost("sent what cannot be read") from error

    def close(self) -> None:
        """End the process and reap it. Idempotent. Memory that is mapped stays."""
        if self._connection.closed:
            return
        self._connection.close()
        if self.memory >= 0:
            os.close(self.memory)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe_exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # a death that has just begun
        status = self._process.returncode
        if status is None:
            return "does not answer"
        if status < 0:
            return f"was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"exited with status {status}"


def _environ(threads: int) -> dict[str, str]:
    """Our environment variables, with headrace importable."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if _PACKAGE_ROOT.name not in ("site-packages", "dist-packages"):  # else it is importable as it is
        path = os.environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{_PACKAGE_ROOT}{os.pathsep}{path}" if path else str(_PACKAGE_ROOT)
    return environ


def serve(connection: Connection) -> None:
    """What the process does: start, then prefill until the parent is gone."""
    with contextlib.suppress(EOFError, OSError), ExitStack() as resources:
        setup: _Setup = connection.recv()
        try:
            prefiller, follower, memory = _start(setup, resources)
        except (HeadraceError, OSError) as error:
            connection.send(Failed(str(error)))
            return
        connection.send(prefiller.hello)
        with socket.socket(fileno=os.dup(connection.fileno())) as channel:
            socket.send_fds(channel, [b"m"], [memory])
        wait_s = 0.0
        while True:
            while connection.poll(wait_s):
                message = connection.recv()
                if isinstance(message, Drop):
                    prefiller.drop(message.number)
                else:
                    prefiller.add(message)
                wait_s = 0.0
            if follower is not None:
                follower.poll()
            answer = prefiller.step()
            if answer is not None:
                connection.send(answer)
            wait_s = 0.0 if answer is not None else _IDLE_S


def _start(setup: _Setup, resources: ExitStack) -> tuple[Prefiller, WeightFollower | None, int]:
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.threads)
    tune_allocator()
    reader = resources.enter_context(WeightReader(setup.store, "prefill")) if setup.store else None
    model = load_model(setup.model, dtype=setup.dtype, attn_implementation=ATTENTION)
    memory = os.memfd_create("headrace-prefill")
    if reader is None:
        weights_id = setup.weights_id or content_digest(model.module)
        return Prefiller(model, setup.config, weights_id, memory, setup.slots), None, memory
    pinned = attach(model, reader)
    prefiller = Prefiller(model, setup.config, pinned.weights_id, memory, setup.slots)
    prefiller.version = pinned.version
    return prefiller, WeightFollower(prefiller, reader, pinned), memory


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent
    # By its own name: a message of a class of `__main__` would be another class to the parent.
    from headrace.engine.process import serve as serve_prefill

    serve_prefill(Connection(int(sys.argv[1])))
