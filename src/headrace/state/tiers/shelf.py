"""The disk tier's folder: whole files, a bound on their bytes, and which of them goes first.

`FOLDER/<identity>/<first key>-<blocks>-<first index>-<reach>-<kind>.kv`. A file's time of modification says when it
was used last.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headrace import locks
from headrace.files import TEMPORARY_PREFIX
from headrace.state.eviction import BlockFacts, EvictionPolicy, Kind, finite
from headrace.state.tiers.base import Counters, FlatBlock
from headrace.state.tiers.extent import pack_header, runs

SUFFIX = ".kv"
_LOCK = ".lock"
_LOCK_TIMEOUT_S = 5.0
_ABANDONED_S = 600.0
"""A temporary file of this age was left by a process that died."""
_GUESSED_BLOCK_TOKENS = 16


class ShelfFull(Exception):
    """There is no room, and none could be made."""


class Shelf:
    """The files under one folder. Used by the tier's writer thread; `touch`, `remove`, `pin` by its owner too."""

    def __init__(
        self, folder: Path, capacity_bytes: int, policy: EvictionPolicy, clock: Callable[[], float]
    ) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._policy = policy
        self._clock = clock
        self._pins: dict[Path, list[float]] = {}
        self._guard = threading.Lock()

    def prepare(self) -> OSError | None:
        """Make the folder; what the system says against it, if anything."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            return error
        return None

    def folder_of(self, identity: bytes) -> Path:
        return self.folder / identity.hex()

    def put(self, blocks: Sequence[FlatBlock], counters: Counters) -> int:
        """Write blocks as files, in runs; returns how many blocks were written.

        Raises:
            ShelfFull: what is left of them does not fit.
            OSError: the system refused.
        """
        written = 0
        lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for run in runs(blocks):
                size = sum(block.flat.size for block in run)
                header = pack_header(run)
                if not locks.lock(lock, 0, exclusive=True, timeout_s=_LOCK_TIMEOUT_S):
                    counters.late += len(run)
                    continue
                try:
                    if not self._make_room(len(header) + size, counters):
                        counters.full += len(run)
                        continue
                    self._write(run, header)
                finally:
                    locks.unlock(lock, 0)
                written += len(run)
        finally:
            os.close(lock)
        return written

    def free(self, nbytes: int, counters: Counters) -> int:
        """Remove at least so many bytes of the least valuable files, if they are there; returns how many."""
        files = self._files()
        return self._remove_cheapest(files, nbytes, counters)

    def touch(self, path: Path, when: float) -> None:
        with contextlib.suppress(OSError):
            os.utime(path, (when, when))

    def remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def relabel(self, path: Path, kind: Kind) -> Path | None:
        """Rename a file after its blocks' new kind; None if it is gone."""
        parts = path.name.removesuffix(SUFFIX).split("-")
        renamed = path.with_name("-".join((*parts[:-1], str(int(kind)))) + SUFFIX)
        try:
            path.rename(renamed)
        except OSError:
            return None
        with self._guard:
            if path in self._pins:
                self._pins[renamed] = self._pins.pop(path)
        return renamed

    def pin(self, path: Path, until: float) -> None:
        with self._guard:
            self._pins.setdefault(path, []).append(until)

    def unpin(self, path: Path, until: float) -> None:
        with self._guard, contextlib.suppress(KeyError, ValueError):
            self._pins[path].remove(until)

    def _write(self, run: Sequence[FlatBlock], header: bytes) -> None:
        first = run[0].key
        folder = self.folder_of(first.identity)
        folder.mkdir(mode=0o700, exist_ok=True)
        reach, kind = max(block.reach for block in run), run[0].kind
        name = f"{first.key.hex()}-{len(run)}-{first.index}-{reach}-{int(kind)}{SUFFIX}"
        temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with temporary.open("xb", buffering=0) as stream:
                for part in (header, *(block.flat for block in run)):
                    view = memoryview(part)
                    while len(view):
                        view = view[stream.write(view) :]
            now = self._clock()
            os.utime(temporary, (now, now))
            temporary.replace(folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int, counters: Counters) -> bool:
        if size > self.capacity_bytes:
            return False
        files = self._files()
        over = sum(nbytes for _, nbytes, _ in files) + size - self.capacity_bytes
        return over <= 0 or self._remove_cheapest(files, over, counters) >= over

    def _files(self) -> list[tuple[Path, int, float]]:
        """All files (path, bytes, last use), temporaries too; abandoned ones and empty folders are removed."""
        found = []
        for folder in self._folders():
            entries = 0
            with contextlib.suppress(OSError), os.scandir(folder) as listing:
                for entry in listing:
                    entries += 1
                    with contextlib.suppress(OSError):
                        stat = entry.stat(follow_symlinks=False)
                        abandoned = time.time() - stat.st_mtime > _ABANDONED_S
                        if entry.name.startswith(TEMPORARY_PREFIX) and abandoned:
                            os.unlink(entry.path)
                            continue
                        found.append((Path(entry.path), stat.st_size, stat.st_mtime))
            if not entries:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return found

    def _folders(self) -> list[Path]:
        return folders(self.folder)

    def _remove_cheapest(
        self, files: Sequence[tuple[Path, int, float]], nbytes: int, counters: Counters
    ) -> int:
        now = self._clock()
        with self._guard:
            pinned = {path for path, until in self._pins.items() if any(now < t for t in until)}
        candidates = [file for file in files if file[0].suffix == SUFFIX and file[0] not in pinned]
        if not candidates:
            return 0
        names = [facts_of_name(path) for path, _, _ in candidates]
        facts = BlockFacts(
            np.array([kind for _, kind, _, _ in names]),
            finite(np.array([used for _, _, used in candidates]), now),
            np.array([reach for _, _, reach, _ in names]),
            np.array([index * _GUESSED_BLOCK_TOKENS for _, _, _, index in names]),
            np.zeros(len(names)),
        )
        freed = 0
        for i in np.argsort(self._policy.values(now, facts), kind="stable"):
            if freed >= nbytes:
                break
            path, size, _ = candidates[i]
            with contextlib.suppress(OSError):
                path.unlink()
                freed += size
                counters.evicted += names[i][0]
        return freed


def folders(folder: Path) -> list[Path]:
    """The folders of the identities that have files, sorted."""
    try:
        with os.scandir(folder) as listing:
            return sorted(Path(entry.path) for entry in listing if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def facts_of_name(path: Path) -> tuple[int, Kind, int, int]:
    """What a file's name claims: blocks, kind, reach and first index; of a strange name, little worth."""
    try:
        _, blocks, index, reach, kind = path.name.removesuffix(SUFFIX).split("-")
        return int(blocks), Kind(int(kind)), min(int(reach), 1 << 30), min(int(index), 1 << 30)
    except ValueError:
        return 1, Kind.FINISHED, 0, 0


def held(folder: Path) -> tuple[int, int]:
    """Blocks (as the names claim) and bytes of all files."""
    blocks = nbytes = 0
    for identity in folders(folder):
        for path in identity.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                nbytes += path.stat().st_size
                blocks += facts_of_name(path)[0]
    return blocks, nbytes
