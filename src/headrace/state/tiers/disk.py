"""Blocks on disk: one folder per identity, files of consecutive blocks, shared by any number of processes and runs.

Invariants (beyond those of every tier)
* A file appears whole under its name (written beside it and renamed) and never changes. What a crash of the machine
  leaves of it, its checksums tell.
* Names only say how valuable a file is; what it holds, its checked header says.
* The caller never waits for the disk longer than the deadline: a helper thread reads headers and cold data, another one
  writes files. What is not there in time is a miss.
* The folder's files stay within `capacity_bytes`, whoever writes: a file's room is made under the folder's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.kernels.copying import Loading, store
from headrace.kernels.fingerprint import digest_of_sums
from headrace.state.eviction import EvictionPolicy, Kind, LeastRecentlyUsed
from headrace.state.tiers.base import DISK, BlockKey, Counters, FlatBlock, NewBlock, TierStats
from headrace.state.tiers.extent import Extent, ExtentError, read_header
from headrace.state.tiers.helper import Helper, Job
from headrace.state.tiers.shelf import SUFFIX, Shelf, ShelfFull, facts_of_name, held

REFRESH_S = 0.25
"""How often the folder is looked at for what others wrote."""
_OPEN_FILES = 128
_TOUCH_S = 10.0
_LATE_LIMIT = 3
"""So many deadlines missed in a row switch the tier off for `_PAUSE_S`."""
_PAUSE_S = 30.0
_CLOSE_TIMEOUT_S = 30.0
_READ_PIECE = 1 << 20


@dataclass(eq=False, slots=True)
class _File:
    path: Path
    extent: Extent
    kind: Kind
    last_used: float
    touched: float
    descriptor: int | None = None
    pins: int = 0


@dataclass(slots=True)
class _Part:
    file: _File
    block: int
    kind: Kind
    last_used: float


class DiskTier:
    """One process's view of the folder.

    Args:
        folder: made if it is missing.
        capacity_bytes: of all files in it; each process holds to its own number.
        deadline_s: how long a lookup or a read may keep the caller waiting.
        queue_bytes: memory for blocks that wait to be written; more are left out.
        clock: seconds since the epoch, since files carry it as the time of their last use.

    Attributes:
        unusable: the folder cannot be made or written to, for another reason than a full disk.
    """

    name = DISK

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        policy: EvictionPolicy | None = None,
        deadline_s: float = 0.5,
        queue_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = Counters()
        self.policy = policy or LeastRecentlyUsed()
        self.deadline_s = deadline_s
        self.note = ""
        self._clock = clock
        self._queue_bytes = queue_bytes
        self._queued = 0
        self._shelf = Shelf(folder, capacity_bytes, self.policy, clock)
        self._files: dict[Path, _File] = {}
        self._bad: set[Path] = set()
        self._index: dict[bytes, tuple[_File, int]] = {}
        self._writing: set[bytes] = set()
        self._pending: list[FlatBlock] = []
        self._seen: dict[bytes, tuple[float, int]] = {}
        self._late_in_a_row = 0
        self._paused_until = -1.0
        self._may_write = True
        self._reader = Helper("reader of KV on disk")
        self._writer = Helper("writer of KV to disk")
        error = self._shelf.prepare()
        if error:
            self._refused(error)
        self.unusable = error is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT)

    def refresh(self, identity: bytes) -> None:
        """Look at the identity's folder, at most every `REFRESH_S`, and no longer than the deadline."""
        self._close_some()
        now = time.monotonic()
        looked, stamp = self._seen.get(identity, (-1e9, -1))
        if now - looked < REFRESH_S or self._off():
            return
        known = frozenset(self._files) | self._bad
        result = self._wait(self._reader.submit(lambda: self._look(identity, stamp, known)))
        self._seen[identity] = (time.monotonic(), stamp)
        if result is None:
            return
        stamp, found, bad = result
        for file in found:
            self._add(file)
        self._bad |= set(bad)
        self.counters.corrupt += len(bad)
        self._seen[identity] = (time.monotonic(), stamp)

    def holds(self, key: BlockKey) -> bool:
        return key.key in self._index and not self._off()

    def offer(self, key: BlockKey, loading: Loading, stored: int, taken: int, first: int) -> _Part | None:
        place = self._index.get(key.key)
        if place is None or self._off():
            return None
        file, block = place
        extent = file.extent
        size = stored * loading.layout.row_bytes
        descriptor = self._open(file)
        if extent.keys[block][:4] != key[:4] or extent.block_bytes != size or descriptor is None:
            return None
        loading.add_file(descriptor, extent.data_at + block * size, stored, taken, first)
        return _Part(file, block, file.kind, file.last_used)

    def ready(self, tickets: Sequence[object]) -> bool:
        """Let the helper read cold blocks into the system's cache."""
        parts = [t for t in tickets if isinstance(t, _Part) and t.file.descriptor is not None]
        if self._off():
            return False
        spans = []
        for part in parts:
            assert part.file.descriptor is not None
            # A handle of its own: the helper may be at it when this one is closed.
            with contextlib.suppress(OSError):
                size = part.file.extent.block_bytes
                spans.append(
                    (os.dup(part.file.descriptor), part.file.extent.data_at + part.block * size, size)
                )
        done = self._wait(self._reader.submit(lambda: _read_spans(spans)))
        if done is None:
            self.counters.late += len(parts)
        return done is not None

    def confirm(self, key: BlockKey, ticket: object, status: int, sums: np.ndarray, size: int) -> bool:
        assert isinstance(ticket, _Part)
        file = ticket.file
        if status in (errno.EAGAIN, errno.EOPNOTSUPP):
            return False  # late, and counted as such
        if status:
            self.counters.errors += 1
            self._forget(file)
            return False
        if digest_of_sums(sums, size, key.key) != file.extent.fingerprints[ticket.block]:
            self.counters.corrupt += 1
            self._forget_from(file, ticket.block)
            return False
        self.counters.hits += 1
        now = self._clock()
        file.last_used = now
        if now - file.touched > _TOUCH_S:
            file.touched = now
            self._shelf.touch(file.path, now)
        return True

    def write(self, blocks: Sequence[NewBlock]) -> int:
        """Hand blocks to the writer; it makes files of the runs among them."""
        flat = []
        for block in blocks:
            if self._is_new(block.key):
                memory = np.empty(sum(t.numel() * t.element_size() for t in block.tensors), dtype=np.uint8)
                (sums,) = store([block.tensors], [memory.ctypes.data])
                fingerprint = digest_of_sums(sums, memory.size, block.key.key)
                flat.append(FlatBlock(block.key, memory, fingerprint, block.kind, block.reach))
        return len(blocks) - len(flat) + self.write_flat(flat)

    def write_flat(self, blocks: Sequence[FlatBlock]) -> int:
        """`write` for blocks that are flat and fingerprinted; returns how many were accepted."""
        blocks = [block for block in blocks if self._is_new(block.key)]
        size = sum(block.flat.size for block in blocks)
        if not blocks or not self._may_write or self._off():
            return 0
        if self._queued + size > self._queue_bytes:
            self.counters.full += len(blocks)
            return 0
        self._queued += size
        self._writing |= {block.key.key for block in blocks}
        self._writer.submit(lambda: self._write_now(blocks))
        return len(blocks)

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything that was handed over is written (or refused); False when that took too long."""
        return self._writer.submit(lambda: True).wait(timeout_s)

    def pin(self, keys: Sequence[BlockKey], until: float) -> list[object]:
        """Pinned files stay open here, so that they can be read even after somebody else has removed them."""
        handles: list[object] = []
        for key in keys:
            place = self._index.get(key.key)
            if place is None or self._open(place[0]) is None:
                break
            place[0].pins += 1
            handles.append((place[0], until))
            self._shelf.pin(place[0].path, until)
        return handles

    def unpin(self, handles: Sequence[object]) -> None:
        for file, until in handles:  # type: ignore[misc, attr-defined]
            file.pins -= 1
            self._shelf.unpin(file.path, until)

    def relabel(self, keys: Sequence[BlockKey], old: Kind, new: Kind) -> None:
        """A file's blocks share one kind; it changes when one of them does."""
        for key in keys:
            place = self._index.get(key.key)
            if place is not None and place[0].kind == old:
                file = place[0]
                file.kind = new
                renamed = self._shelf.relabel(file.path, new)
                if renamed is not None:
                    self._files.pop(file.path, None)
                    file.path = renamed
                    self._files[renamed] = file

    def expect(self, keys: Sequence[BlockKey], when: float) -> None: ...

    def retire(self, identity: bytes) -> None:
        """Other runs may hold the same weights: their files go when they are the least valuable ones."""

    def evict(self, nbytes: int) -> int:
        return self._shelf.free(nbytes, self.counters)

    def stats(self) -> TierStats:
        blocks, nbytes = held(self._shelf.folder)
        return TierStats(self.name, blocks, nbytes, self._shelf.capacity_bytes, self.counters, self.note)

    def close(self) -> None:
        """Write what is under way, within a deadline, and let go of the files."""
        if not self.flush():
            self.counters.late += len(self._writing)
        self._writer.stop()
        self._reader.stop()
        for file in list(self._files.values()):
            self._close(file)
        self._files.clear()
        self._index.clear()
        self._may_write = False

    def _off(self) -> bool:
        return time.monotonic() < self._paused_until

    def _wait(self, job: Job) -> Any:
        """A job's result; None if it was not there in time (then the tier may pause) or failed."""
        if job.wait(self.deadline_s):
            self._late_in_a_row = 0
            if job.error is not None:
                self._refused(job.error)
                return None
            return job.result
        self._late_in_a_row += 1
        if self._late_in_a_row >= _LATE_LIMIT:
            self._paused_until = time.monotonic() + _PAUSE_S
            self.note = f"slow: nothing within {self.deadline_s} s, {_LATE_LIMIT} times in a row"
        return None

    def _look(
        self, identity: bytes, stamp: int, known: frozenset[Path]
    ) -> tuple[int, list[_File], list[Path]]:
        """In the helper: files that are new, and such that are damaged (removed)."""
        folder = self._shelf.folder_of(identity)
        try:
            now_stamp = folder.stat().st_mtime_ns
        except OSError:
            return -1, [], []
        if now_stamp == stamp:
            return stamp, [], []
        found, bad = [], []
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if path in known:
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    extent = read_header(descriptor, identity)
                    used = os.fstat(descriptor).st_mtime
                finally:
                    os.close(descriptor)
            except ExtentError:
                bad.append(path)
                self._shelf.remove(path)
            except OSError:  # gone, or not to be read: somebody else's business
                continue
            else:
                found.append(_File(path, extent, facts_of_name(path)[1], used, used))
        return now_stamp, found, bad

    def _add(self, file: _File) -> None:
        self._files[file.path] = file
        for i, key in enumerate(file.extent.keys):
            self._index[key.key] = (file, i)
            self._writing.discard(key.key)

    def _forget(self, file: _File) -> None:
        self._close(file)
        self._files.pop(file.path, None)
        self._bad.add(file.path)
        for key in file.extent.keys:
            if self._index.get(key.key, (None,))[0] is file:
                del self._index[key.key]

    def _forget_from(self, file: _File, block: int) -> None:
        """A block is damaged: it and those behind it are not found any more. A file without a good one is removed."""
        if not block:
            self._forget(file)
            self._shelf.remove(file.path)
            return
        for key in file.extent.keys[block:]:
            if self._index.get(key.key, (None,))[0] is file:
                del self._index[key.key]

    def _open(self, file: _File) -> int | None:
        if file.descriptor is None:
            try:
                file.descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(file.descriptor).st_size != file.extent.size:
                    raise OSError(errno.ENODATA, "cut short")
            except FileNotFoundError:  # evicted, perhaps by another process
                self.counters.misses += 1
                self._forget(file)
                self._bad.discard(file.path)
                return None
            except OSError:
                self.counters.errors += 1
                self._forget(file)
                return None
        return file.descriptor

    def _close(self, file: _File) -> None:
        if file.descriptor is not None:
            os.close(file.descriptor)
            file.descriptor = None

    def _close_some(self) -> None:
        """Keep few files open. Only between loads: one whose block was offered must stay open until it is loaded."""
        opened = [file for file in self._files.values() if file.descriptor is not None and not file.pins]
        if len(opened) > _OPEN_FILES:
            opened.sort(key=lambda file: file.last_used)
            for file in opened[: -_OPEN_FILES // 2]:
                self._close(file)

    def _is_new(self, key: BlockKey) -> bool:
        return key.key not in self._index and key.key not in self._writing

    def _write_now(self, blocks: Sequence[FlatBlock]) -> None:
        """In the writer."""
        try:
            self.counters.stored += self._shelf.put(blocks, self.counters)
        except ShelfFull as error:
            self.counters.full += len(blocks)
            self.note = str(error)
        except OSError as error:
            self._refused(error)
        finally:
            self._queued -= sum(block.flat.size for block in blocks)
            for block in blocks:
                self._writing.discard(block.key.key)
            self._seen.pop(blocks[0].key.identity, None)  # look again at once

    def _refused(self, error: BaseException) -> None:
        self.counters.errors += 1
        self.note = f"{self._shelf.folder}: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, OSError) and error.errno in (
            errno.EROFS,
            errno.EACCES,
            errno.EPERM,
            errno.ENOTDIR,
        ):
            self._may_write = False


def _read_spans(spans: Sequence[tuple[int, int, int]]) -> bool:
    buffer = memoryview(bytearray(_READ_PIECE))
    for file, offset, size in spans:
        try:
            while size > 0:
                got = os.preadv(file, [buffer[: min(size, _READ_PIECE)]], offset)
                if not got:
                    break
                offset, size = offset + got, size - got
        except OSError:
            pass  # the load that follows meets it too, and says so
        finally:
            os.close(file)
    return True
