"""A named piece of host memory that several processes attach to: a mapped file in the system's memory folder.

Invariants
* Under its name a segment is always complete: it is made under another name and linked.
* Everyone attached holds a lock on it, which the system releases at death. A segment that nobody holds is a
  leftover: it is removed, never attached to.
* The last one to close it removes it.
* A page is written only after the system has promised it (`reserve`): memory that is full refuses, it does not kill.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import struct
import tempfile
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path

from headrace import locks
from headrace.files import TEMPORARY_PREFIX

PREFIX = "headrace-kv-"
_MAGIC = b"HRKVSHM1"
_HEADER = struct.Struct(
    "<8sQQQQQ"
)  # magic, places, bytes of a place, tokens of a block, start of data, all bytes
_CHECKED = 64
HEADER_BYTES = 4096
SEQUENCE_AT = 128
"""Where the header counts the blocks ever stored (uint64)."""
RESERVED_AT = 136
"""Where the header says how many places the system has promised (uint64)."""

ALIVE, WRITER = 0, 1
"""Bytes of the file whose locks say who is attached and who writes."""

_ATTACH_TIMEOUT_S = 2.0


class SegmentError(Exception):
    """Why there is no segment."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a segment is divided into; entries and log come between the header and the data."""

    places: int
    place_bytes: int
    block_tokens: int
    data_at: int
    size: int


def memory_folder() -> Path:
    """Where files lie in memory."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def segment_path(name: str, folder: Path | None = None) -> Path:
    return (folder or memory_folder()) / f"{PREFIX}{name}"


class Segment:
    """An attached segment; `attach` and `look` make one."""

    def __init__(self, path: Path, file: int, shape: Shape) -> None:
        self.path = path
        self.file = file
        self.shape = shape
        self.map = mmap.mmap(file, shape.size)
        self._finalizer = weakref.finalize(self, _release, path, file, os.getpid())

    @classmethod
    def attach(cls, path: Path, wanted: Shape) -> Segment:
        """Attach to the segment of this name, or make it in the wanted shape; an existing one keeps its own.

        Raises:
            SegmentError: the system refuses, or somebody holds a damaged one.
        """
        deadline = time.monotonic() + _ATTACH_TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                segment = cls._join(path, deadline) or cls._make(path, wanted)
                if segment is not None:
                    return segment
        except OSError as error:
            raise SegmentError(f"{path}: {error.strerror}") from None
        raise SegmentError(f"{path}: others kept making and removing it for {_ATTACH_TIMEOUT_S:.0f} s")

    @classmethod
    def look(cls, path: Path) -> Segment | None:
        """Attach to a segment that is there and in use, else None."""
        try:
            return cls._join(path, time.monotonic() + _ATTACH_TIMEOUT_S)
        except (OSError, SegmentError):
            return None

    @property
    def intact(self) -> bool:
        """Whether the file still is as long as what is mapped: beyond its end memory cannot be touched."""
        try:
            return os.fstat(self.file).st_size >= self.shape.size
        except OSError:
            return False

    def reserve(self, places: int) -> None:
        """Make sure that the first `places` places have memory.

        Raises:
            OSError: there is no room for them.
        """
        shape = self.shape
        os.posix_fallocate(self.file, 0, shape.data_at + places * shape.place_bytes)

    def close(self) -> None:
        """Detach; the last one removes the segment. Views of the map must be gone."""
        with contextlib.suppress(BufferError):
            self.map.close()
        self._finalizer()

    @classmethod
    def _join(cls, path: Path, deadline: float) -> Segment | None:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if locks.try_lock(file, ALIVE, exclusive=True):  # nobody is there: a leftover
                if _is_at(path, file):
                    path.unlink()
                os.close(file)
                return None
            if not locks.lock(file, ALIVE, exclusive=False, timeout_s=max(deadline - time.monotonic(), 0)):
                raise SegmentError(f"{path}: somebody holds it alone")
            if not _is_at(path, file):  # removed meanwhile
                os.close(file)
                return None
            return cls(path, file, _read_shape(path, file))
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(file)
            raise

    @classmethod
    def _make(cls, path: Path, shape: Shape) -> Segment | None:
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            locks.try_lock(file, ALIVE, exclusive=False)
            os.ftruncate(file, shape.size)
            os.posix_fallocate(file, 0, shape.data_at)
            os.pwrite(file, _pack_shape(shape), 0)
            os.link(temporary, path)
        except FileExistsError:  # somebody was faster
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return cls(path, file, shape)


def remove_leftovers(folder: Path | None = None) -> int:
    """Remove the segments of processes that have all died; returns how many."""
    removed = 0
    for path in (folder or memory_folder()).glob(f"*{PREFIX}*"):
        if not path.name.startswith((PREFIX, TEMPORARY_PREFIX)):
            continue
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if locks.try_lock(file, ALIVE, exclusive=True) and _is_at(path, file):
                    path.unlink()
                    removed += 1
            finally:
                os.close(file)
    return removed


def _pack_shape(shape: Shape) -> bytes:
    packed = _HEADER.pack(
        _MAGIC, shape.places, shape.place_bytes, shape.block_tokens, shape.data_at, shape.size
    ).ljust(_CHECKED, b"\0")
    return packed + hashlib.blake2b(packed, digest_size=16).digest()


def _read_shape(path: Path, file: int) -> Shape:
    packed = os.pread(file, _CHECKED + 16, 0)
    if hashlib.blake2b(packed[:_CHECKED], digest_size=16).digest() != packed[_CHECKED:]:
        raise SegmentError(f"{path}: its header is damaged")
    magic, *numbers = _HEADER.unpack_from(packed)
    shape = Shape(*numbers)
    if magic != _MAGIC or os.fstat(file).st_size != shape.size:
        raise SegmentError(f"{path}: not a segment of KV, or cut short")
    return shape


def _is_at(path: Path, file: int) -> bool:
    """Whether the open file still has this name."""
    try:
        there, here = os.stat(path, follow_symlinks=False), os.fstat(file)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _release(path: Path, file: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the handle is its parent's
    with contextlib.suppress(OSError):
        if locks.try_lock(file, ALIVE, exclusive=True) and _is_at(path, file):
            path.unlink()
    with contextlib.suppress(OSError):
        os.close(file)


def reason(error: OSError) -> str:
    """What the system says, in words."""
    return error.strerror or errno.errorcode.get(error.errno or 0, "unknown error")
