"""Locks on a file that the system releases when their holder dies.

They belong to the open file description, so two handles in one process exclude one another too. Linux only.
"""

from __future__ import annotations

import fcntl
import struct
import time

_RETRY_S = 0.001


def try_lock(file: int, offset: int, *, exclusive: bool) -> bool:
    """Take a lock on one byte of an open file; False if another handle holds it in a way that excludes this one."""
    return _set(file, offset, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)


def lock(file: int, offset: int, *, exclusive: bool, timeout_s: float) -> bool:
    """`try_lock` again and again until it succeeds or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(file, offset, exclusive=exclusive):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_S)
    return True


def unlock(file: int, offset: int) -> None:
    _set(file, offset, fcntl.F_UNLCK)


def _set(file: int, offset: int, kind: int) -> bool:
    # struct flock: type, whence (0: from the start), start, length, pid, which must be 0 here.
    request = struct.pack("hhqqi0q", kind, 0, offset, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    except PermissionError:  # how some systems say the same
        return False
    return True
