"""Locks between processes, which the system releases when their holder dies.

Invariants
* A lock is on one byte of a file, which need not exist in it; locks on different bytes know nothing of one another.
* It belongs to the open file: two handles in one process exclude one another too, and a lock ends when its handle is
  closed, in all processes that inherited it.
* Nothing is ever left locked, and a lock's file may stay: only who holds it counts, never that it is there.

Linux only (open file description locks, `fcntl(2)`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RETRY_S = 0.001
_LONGEST_RETRY_S = 0.02
"""Waiting for long asks less often."""

_REQUEST = struct.Struct("hhqqi0q")
"""struct flock: type, whence (0: from the start), start, length, pid, which must be 0 here."""


def try_lock(file: int, offset: int, *, exclusive: bool) -> bool:
    """Take a lock on one byte of an open file; False if another handle holds it in a way that excludes this one.

    An exclusive lock needs a handle that may write, a shared one a handle that may read.
    """
    return _set(file, offset, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)


def lock(file: int, offset: int, *, exclusive: bool, timeout_s: float) -> bool:
    """`try_lock` again and again until it succeeds or the time is over."""
    deadline = time.monotonic() + timeout_s
    pause = _RETRY_S
    while not try_lock(file, offset, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.02 * pause, _LONGEST_RETRY_S)
    return True


def unlock(file: int, offset: int) -> None:
    """Give up what this handle holds on a byte."""
    _set(file, offset, fcntl.F_UNLCK)


def held(file: int, offset: int) -> bool:
    """Whether another handle, here or in another process, holds a lock on a byte. Looking takes none."""
    answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _REQUEST.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
    return bool(_REQUEST.unpack(answer)[0] != fcntl.F_UNLCK)


def lock_file(path: str | Path, *, timeout_s: float) -> int:
    """Make a file if it is missing and lock it (its byte 0) exclusively; the handle, which to close is to unlock.

    Raises:
        TimeoutError: another handle held it for so long.
        OSError: the file cannot be opened for writing.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not lock(file, 0, exclusive=True, timeout_s=timeout_s):
            raise TimeoutError(f"{path} is locked")
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def locked(path: str | Path, *, timeout_s: float) -> Iterator[None]:
    """`lock_file` for the length of the block."""
    file = lock_file(path, timeout_s=timeout_s)
    try:
        yield
    finally:
        os.close(file)


def file_is_locked(path: str | Path) -> bool:
    """Whether somebody holds `lock_file`'s lock; False for a file that is missing or cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return held(file, 0)
    finally:
        os.close(file)


def _set(file: int, offset: int, kind: int) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _REQUEST.pack(kind, 0, offset, 1, 0))
    except BlockingIOError:
        return False
    except PermissionError:  # how some systems say the same
        return False
    return True
