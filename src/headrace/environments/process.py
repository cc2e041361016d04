"""One worker process as its parent sees it.

Invariants
* The process leads a process group of its own; `kill` ends the group and reaps the process.
* No send or receive blocks longer than `IO_TIMEOUT_S` without progress: then it raises OSError, as it does
  when the process is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from headrace.environments.messages import Setup

IO_TIMEOUT_S = 5
_EXIT_WAIT_S = 0.5
_REAP_TIMEOUT_S = 1.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """A started worker and the `connection` to it.

    On Linux the worker is told of the death of the thread that makes this object, and dies of it too, so that
    thread must last as long as it is needed.

    Args:
        setup: the environment to build.
        output: where the worker's standard output and error go; this process's standard error by default.
    """

    def __init__(self, setup: Setup, output: int | IO[Any] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Not a multiprocessing spawn: that would import the user's __main__ again in every worker.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.environments.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=_worker_environ(),
                start_new_session=True,
            )
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", IO_TIMEOUT_S, 0))
        self.connection = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it died at once: the end of its stream will say so
            self.connection.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def describe_exit(self) -> str:
        """How the process ended, waiting shortly for a death that has just begun."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_WAIT_S)
        status = self._process.returncode
        if status is None:
            return "closed its connection"
        if status < 0:
            return f"was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"exited with status {status}"

    def kill(self) -> None:
        """End the process and its group now, and reap it. Idempotent."""
        if self.connection.closed:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_TIMEOUT_S)


def _worker_environ() -> dict[str, str]:
    """Our environment variables, with headrace importable and text hashes equal in every worker and run."""
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    if _PACKAGE_ROOT.name not in ("site-packages", "dist-packages"):  # else it is importable as it is
        path = os.environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{_PACKAGE_ROOT}{os.pathsep}{path}" if path else str(_PACKAGE_ROOT)
    return environ
