"""Peers: the systems headrace is measured against, each in a virtual environment of its own.

Invariants
* A peer's packages are exactly those of `requirements/NAME.txt`; nothing of headrace's own environment shows.
* `venvs/NAME` counts as made only once its stamp stands in it. The stamp is a digest of the requirements and
  of the Python version, so that either one's change makes it anew.
* A peer is never measured while it is being installed, and runs alone: every call here returns when its
  process has ended.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
SOURCES = BENCHMARKS.parent / "src"
STAMP = ".complete"

INSTALL_TIMEOUT_S = 3600.0


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
    run([*pip, "--requirement", str(requirements)], what=what, timeout_s=INSTALL_TIMEOUT_S)
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


def _digest(requirements: Path) -> str:
    content = platform.python_version().encode() + b"\n" + requirements.read_bytes()
    return hashlib.sha256(content).hexdigest()
