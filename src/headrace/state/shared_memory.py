"""A named segment of shared memory that holds tensors twice, so that one copy is read while the other is written.

    header | two commit words | two descriptors | names of readers | layout | buffer 0 | buffer 1

Invariants
* A segment appears under its name complete or not at all, and every byte it promises is reserved: writing never
  meets a full file system.
* A descriptor counts only while its commit word is the digest of it. The word is written last and cleared first, so
  whoever is killed in between leaves the other buffer's version in force.
* Whatever is read from a header is checked against a digest: damage is an error, never another meaning.

Linux only: the locks that guard it are released by the system when their holder dies.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.errors import RunError, UserError
from headrace.locks import held, try_lock

FOLDER = Path("/dev/shm")
"""Where the system keeps named shared memory."""

READERS = 64
"""Readers that one segment can have."""

_PREFIX = "headrace-weights-"
_MAGIC = b"HEADRACE"
_FORMAT = 1
_HEADER = struct.Struct("<8sIIQQ16s")
"""Magic, format, bytes of the layout, where buffer 0 begins, bytes of a buffer, digest of these and the layout."""

_COMMITS, _DESCRIPTORS, _DESCRIPTOR_BYTES = 64, 128, 1024
_NAMES, _NAME_BYTES = 4096, 64
_LAYOUT = _NAMES + READERS * _NAME_BYTES
_ROUND = 65536
_ALIGNMENT = 64

# Locked bytes lie behind the end of any file.
_LOCKS = 1 << 40
PUBLISHER = _LOCKS
"""Held by the process that may write."""


def reader_byte(reader: int) -> int:
    """The byte that a reader holds while it is attached."""
    return _LOCKS + 1 + reader


def pin_byte(buffer: int, reader: int) -> int:
    """The byte that a reader holds while it uses a buffer, and the publisher while it writes it."""
    return _LOCKS + 1 + READERS * (1 + buffer) + reader


class SharedMemoryError(RunError):
    """Shared memory is damaged, was replaced, or does not hold what its header says."""


class Entry(NamedTuple):
    """One tensor of the layout: all its names, and where in a buffer it lies (bytes)."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Published(NamedTuple):
    """A version that a buffer holds. `sequence` counts the publishes of this segment."""

    sequence: int
    version: int
    weights_id: str
    fingerprint: str


def layout_of(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """How tensors lie in a buffer; names of one tensor (tied weights) share its place."""
    names: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else name
        names.setdefault((tensor.dtype, same), []).append(name)
    entries = []
    offset = 0
    for group in names.values():
        tensor = tensors[group[0]]
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(tuple(group), dtype, tuple(tensor.shape), offset))
        offset += _rounded(tensor.numel() * tensor.element_size(), _ALIGNMENT)
    return tuple(entries)


def difference(ours: Sequence[Entry], theirs: Sequence[Entry]) -> str | None:
    """The first tensor in which two layouts differ, in words; None if they are the same."""
    a, b = (
        {name: (entry.dtype, entry.shape) for entry in entries for name in entry.names}
        for entries in (ours, theirs)
    )
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name) != b.get(name):
            shown = ["none" if x is None else f"{x[0]} {list(x[1])}" for x in (a.get(name), b.get(name))]
            return f"{name} is {shown[0]} here and {shown[1]} there"
    return None if tuple(ours) == tuple(theirs) else "other weights are tied"


def segment_path(name: str) -> Path:
    """The file of a segment.

    Raises:
        UserError: the name cannot be part of a file's name, or the system has no such memory.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise UserError(f"{name!r} cannot name shared weights; use up to 100 letters, digits and . _ -")
    if not FOLDER.is_dir() or not hasattr(os, "O_TMPFILE"):
        raise UserError(f"shared weights need Linux and its shared memory in {FOLDER}")
    return FOLDER / f"{_PREFIX}{name}"


def segment_names() -> list[str]:
    """The names of all segments that are here."""
    return sorted(path.name.removeprefix(_PREFIX) for path in FOLDER.glob(f"{_PREFIX}*"))


def remove_damaged(path: Path) -> None:
    """Take a segment that cannot be opened off its name, unless somebody publishes there."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if try_lock(file, PUBLISHER, exclusive=True):
            Segment(path, file, (), 0, 0).remove()
    finally:
        os.close(file)


class Segment:
    """An open segment. `file` is the descriptor that locks belong to.

    A child that this process forks (without exec) shares the descriptor, and so its locks.
    """

    def __init__(self, path: Path, file: int, layout: tuple[Entry, ...], start: int, size: int) -> None:
        self.path, self.file, self.layout = path, file, layout
        self.start, self.size = start, size
        """Where buffer 0 begins in the file, and the bytes of a buffer."""
        self._memory: dict[tuple[int, bool], Tensor] = {}

    @classmethod
    def create(cls, path: Path, layout: tuple[Entry, ...]) -> Segment:
        """A new segment under `path`, which this process may write.

        Raises:
            UserError: there is too little shared memory.
            FileExistsError: `path` exists.
        """
        text = json.dumps(layout).encode()
        start = _rounded(_LAYOUT + len(text), _ROUND)
        size = _rounded(max(_end(layout), 1), _ROUND)
        file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(file, 0, start + 2 * size)
            except OSError as error:
                free = os.statvfs(path.parent)
                raise UserError(
                    f"too little shared memory for weights: two versions take {2 * size / 2**20:,.0f} MB, "
                    f"{free.f_bavail * free.f_frsize / 2**20:,.0f} MB are free in {path.parent} "
                    f"({error.strerror}); enlarge it, or end what uses it"
                ) from None
            os.pwrite(file, _packed_header(text, start, size), 0)
            os.pwrite(file, text, _LAYOUT)
            try_lock(file, PUBLISHER, exclusive=True)
            # A directory, though an absolute path ignores it, makes Python follow the link to the nameless file.
            os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)
        except BaseException:
            os.close(file)
            raise
        return cls(path, file, layout, start, size)

    @classmethod
    def open(cls, path: Path) -> Segment:
        """An existing segment.

        Raises:
            FileNotFoundError: there is none.
            SharedMemoryError: it is not one, or damaged.
        """
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fixed = os.pread(file, _HEADER.size, 0)
            if len(fixed) < _HEADER.size:
                raise SharedMemoryError(f"{path} is damaged: it ends within its header")
            magic, version, length, start, size, _ = _HEADER.unpack(fixed)
            if magic != _MAGIC or version != _FORMAT:
                raise SharedMemoryError(
                    f"{path} does not hold weights that this version of headrace can read"
                )
            text = os.pread(file, min(length, os.fstat(file).st_size), _LAYOUT)
            if fixed != _packed_header(text, start, size) or len(text) != length:
                raise SharedMemoryError(f"{path} is damaged: its header is not what was written")
            layout = tuple(Entry(tuple(n), d, tuple(s), o) for n, d, s, o in json.loads(text))
            segment = cls(path, file, layout, start, size)
            segment.check()
        except BaseException:
            os.close(file)
            raise
        return segment

    def check(self) -> None:
        """Raise a `SharedMemoryError` if the segment was cut short, removed or replaced."""
        stat = os.fstat(self.file)
        if stat.st_size < self.start + 2 * self.size:
            raise SharedMemoryError(
                f"{self.path} is damaged: it has {stat.st_size} bytes of {self.start + 2 * self.size}"
            )
        if self.in_place:
            return
        raise SharedMemoryError(f"{self.path} was removed or replaced by its publisher; attach again")

    @property
    def in_place(self) -> bool:
        """Whether the file under `path` is this one."""
        try:
            there, here = os.stat(self.path), os.fstat(self.file)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def remove(self) -> None:
        """Take it off its name. Who holds `PUBLISHER` may do so: nobody else can meanwhile."""
        if self.in_place:
            self.path.unlink(missing_ok=True)

    def descriptor(self, buffer: int) -> Published | None:
        """The version that a buffer holds; None while it holds none.

        Raises:
            SharedMemoryError: the descriptor is not what was written.
        """
        while True:
            word = self._word(buffer)
            if not word:
                return None
            body = os.pread(self.file, _DESCRIPTOR_BYTES, _DESCRIPTORS + buffer * _DESCRIPTOR_BYTES)
            if _commit_word(body, buffer) == word:
                return Published(*json.loads(body.rstrip(b"\0")))
            if self._word(buffer) == word:
                raise SharedMemoryError(
                    f"{self.path} is damaged: a version's description is not what was written"
                )
            time.sleep(0)  # it is being written right now

    def newest(self) -> tuple[int, Published] | None:
        """The buffer with the newest version, and that version; None while there is none."""
        found = [(buffer, published) for buffer in (0, 1) if (published := self.descriptor(buffer))]
        return max(found, key=lambda item: item[1].sequence, default=None)

    def clear(self, buffer: int) -> None:
        """From now on the buffer holds no version."""
        os.pwrite(self.file, bytes(8), _COMMITS + 8 * buffer)

    def commit(self, buffer: int, published: Published) -> None:
        """From now on the buffer, which holds none, holds this version."""
        body = json.dumps(published).encode().ljust(_DESCRIPTOR_BYTES, b"\0")
        if len(body) > _DESCRIPTOR_BYTES:
            raise UserError(f"weights_id must be shorter than {len(published.weights_id)} characters")
        os.pwrite(self.file, body, _DESCRIPTORS + buffer * _DESCRIPTOR_BYTES)
        os.pwrite(self.file, struct.pack("<Q", _commit_word(body, buffer)), _COMMITS + 8 * buffer)

    def reader_name(self, reader: int) -> str:
        text = os.pread(self.file, _NAME_BYTES, _NAMES + reader * _NAME_BYTES).rstrip(b"\0")
        return text.decode(errors="replace")

    def set_reader_name(self, reader: int, name: str) -> None:
        text = name.encode(errors="replace")[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")
        os.pwrite(self.file, text, _NAMES + reader * _NAME_BYTES)

    def memory(self, buffer: int, *, writable: bool = False) -> Tensor:
        """A buffer's bytes, uint8 [size].

        Without `writable`, what somebody writes there by mistake stays in this process.
        """
        if (buffer, writable) not in self._memory:
            flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            mapping = mmap.mmap(self.file, self.size, flags=flags, offset=self.start + buffer * self.size)
            self._memory[buffer, writable] = torch.frombuffer(mapping, dtype=torch.uint8)
        return self._memory[buffer, writable]

    def tensors(self, buffer: int, *, writable: bool = False) -> dict[str, Tensor]:
        """A buffer's tensors by name, views of its memory; names of tied weights get one object."""
        memory = self.memory(buffer, writable=writable)
        views = {}
        for entry in self.layout:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            size = _count(entry.shape) * dtype.itemsize
            view = memory[entry.offset : entry.offset + size].view(dtype).view(entry.shape)
            views.update(dict.fromkeys(entry.names, view))
        return views

    def held(self, byte: int) -> bool:
        """Whether another handle, here or in another process, holds the lock on a byte."""
        return held(self.file, byte)

    def close(self) -> None:
        """Give up the descriptor and its locks. Memory stays mapped as long as a tensor shows it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        self._memory.clear()

    def _word(self, buffer: int) -> int:
        return int.from_bytes(os.pread(self.file, 8, _COMMITS + 8 * buffer), "little")


def _packed_header(layout: bytes, start: int, size: int) -> bytes:
    fields = (_MAGIC, _FORMAT, len(layout), start, size)
    digest = hashlib.blake2b(_HEADER.pack(*fields, bytes(16)) + layout, digest_size=16).digest()
    return _HEADER.pack(*fields, digest)


def _commit_word(body: bytes, buffer: int) -> int:
    digest = hashlib.blake2b(bytes([buffer]) + body, digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1  # never 0, which means "none"


def _end(layout: Sequence[Entry]) -> int:
    return max(
        (entry.offset + _count(entry.shape) * getattr(torch, entry.dtype).itemsize for entry in layout),
        default=0,
    )


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
