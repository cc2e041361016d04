"""Peers: the systems headrace is measured against, and the processes that are measured.

A peer has a virtual environment of its own. What is measured many times, headrace's side too, is a `Worker`: a
process that starts once and then answers requests, so that several sides can be measured in turn.

Invariants
* A peer's packages are exactly those of `requirements/NAME.txt`, which lists all of them; nothing of headrace's own
  environment shows.
* `venvs/NAME` counts as made only once its stamp stands in it. The stamp is a digest of the requirements and
  of the Python version, so that either one's change makes it anew.
* One process computes at a time: a worker sleeps between its answers, and `run` returns when its process has
  ended.
* Every wait for a process has a deadline, and no process outlives its `with` block.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BENCHMARKS = Path(__file__).resolve().parent
SOURCES = BENCHMARKS.parent / "src"
SCRIPTS = BENCHMARKS / "peer_scripts"
STAMP = ".complete"

INSTALL_TIMEOUT_S = 3600.0
CLOSE_TIMEOUT_S = 20.0
LOG_LINES = 30
"""Lines of a failed worker's own output that are shown."""


class PeerError(Exception):
    """A peer cannot be installed or did not finish; the text is one line for the user."""


def ensure_venv(name: str) -> Path:
    """The Python of peer `name`'s virtual environment, which is made first if it is missing or out of date.

    Raises:
        PeerError: its packages cannot be installed.
    """
    requirements = BENCHMARKS / "requirements" / f"{name}.txt"
    folder = BENCHMARKS / "venvs" / name
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    digest = _digest(requirements)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return python
    print(f"installing {name} into {folder.relative_to(BENCHMARKS.parent)} (once)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    what = f"installing {name}"
    run([sys.executable, "-m", "venv", str(folder)], what=what, timeout_s=INSTALL_TIMEOUT_S)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    # What torch pulls in depends on the build of it that the index has; the rest is listed.
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if line.startswith("torch=="):
            run([*pip, line], what=what, timeout_s=INSTALL_TIMEOUT_S)
    run(
        [*pip, "--no-deps", "--requirement", str(requirements)],
        what=what,
        timeout_s=INSTALL_TIMEOUT_S,
    )
    stamp.write_text(digest, encoding="utf-8")
    return python


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """The versions of installed packages, read in the environment that `python` belongs to."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    output = subprocess.run(
        [str(python), "-c", code, *packages], check=True, capture_output=True, text=True, timeout=60
    )
    found = dict(zip(packages, output.stdout.split(), strict=True))
    return found | {"python": platform.python_version()}


def run(
    command: Sequence[str], *, what: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run one process to its end; its output goes to the terminal.

    Args:
        command: the program and its arguments.
        what: names the process in errors.
        timeout_s: past it the process is killed.
        environment: variables set on top of this process's own.

    Raises:
        PeerError: it failed, or took longer than `timeout_s`.
    """
    try:
        result = subprocess.run(
            list(command),
            env=os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise PeerError(f"{what}: {Path(command[0]).name} is not installed here; run `make setup`") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{what}: not done after {timeout_s:.0f} s, so it was stopped") from None
    if result.returncode != 0:
        raise PeerError(f"{what}: ended with exit code {result.returncode}; its own message is above")


class Worker:
    """A process that answers one JSON line for each JSON line it is given, and sleeps between them.

    Its script takes part through `peer_scripts/serving.py`: it reads its settings, loads, answers with facts about
    itself (`ready`), and then answers requests until it is closed. Use it as a context manager.

    Args:
        name: names it in errors.
        command: the program and its arguments.
        settings: what it is started with.
        start_timeout_s: within which it must be ready.
        environment: variables set on top of this process's own.

    Raises:
        PeerError: it ended, or was not ready in time. Its own last lines go to standard error.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._unread = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            list(command),
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # so that what it starts can be stopped with it
        )
        try:
            self.ready = self.ask(settings, timeout_s=start_timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            PeerError: the process ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return dict(json.loads(self._line(timeout_s)))

    def close(self) -> None:
        """End the process: let it go by itself, then make it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait(CLOSE_TIMEOUT_S)
        self._process.stdout.close()
        self._log.close()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(deadline - time.monotonic()):
                    self._kill()
                    raise PeerError(f"{self.name}: no answer after {timeout_s:.0f} s, so it was stopped")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._ended()
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> PeerError:
        """What to raise when the process is no more, after showing its last words."""
        try:
            code = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            code = self._process.wait(CLOSE_TIMEOUT_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
        return PeerError(f"{self.name}: ended with exit code {code}; its own message is above")


def _digest(requirements: Path) -> str:
    content = platform.python_version().encode() + b"\n" + requirements.read_bytes()
    return hashlib.sha256(content).hexdigest()
