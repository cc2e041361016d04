"""Host memory that several processes share: blocks in places of one size, found through a table.

Invariants (beyond those of every tier)
* Only whoever holds the writer's lock changes places. A place's generation is odd while it is written; one that is odd
  when nobody writes was left by a writer that died, and is free.
* A reader copies first and looks at the generation again afterwards: a block that changed meanwhile is a miss.
* An entry names its block completely (identity, parent, tokens) and a hit compares all of it; the fingerprint covers
  bytes and key.
* Nothing in the memory is trusted: damage to any bit of it costs a hit at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace import locks
from headrace.kernels.copying import Loading, store
from headrace.kernels.fingerprint import digest_of_sums
from headrace.state.eviction import EvictionPolicy, Kind, LeastRecentlyUsed
from headrace.state.tiers.base import (
    HOST,
    BlockKey,
    Counters,
    FlatBlock,
    NewBlock,
    TierStats,
)
from headrace.state.tiers.segment import (
    RESERVED_AT,
    SEQUENCE_AT,
    WRITER,
    Segment,
    SegmentError,
    reason,
    remove_leftovers,
    segment_path,
)
from headrace.state.tiers.table import BlockTable, kind_of, shape_of

_WRITE_TIMEOUT_S = 0.1
_EVICT_SHARE = 32
"""When room is short, one of so many places is freed at once."""
_RESERVE_PLACES = 16


@dataclass(slots=True)
class _Place:
    place: int
    generation: int
    kind: Kind
    last_used: float


class SharedTier:
    """One process's view of the memory.

    Args:
        name: processes that give the same one share it.
        capacity_bytes: of the whole; whoever makes it decides.
        place_bytes: bytes of the largest block; larger ones are not stored.
        block_tokens: the most tokens of a block.
        demote: takes copies of blocks that are evicted.
        clock: seconds; all processes that share the memory must mean the same.
        folder: where the file lies; the system's memory folder by default.
    """

    name = HOST

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        place_bytes: int,
        block_tokens: int = 16,
        *,
        policy: EvictionPolicy | None = None,
        demote: Callable[[list[FlatBlock]], None] | None = None,
        clock: Callable[[], float] = time.time,
        folder: Path | None = None,
    ) -> None:
        self.counters = Counters()
        self.policy = policy or LeastRecentlyUsed()
        self.note = ""
        self.demote = demote
        self._clock = clock
        self._retired: set[bytes] = set()
        self._guard = threading.RLock()
        self._index: dict[bytes, int] = {}
        self._seen = 0
        self.segment: Segment | None = None
        try:
            remove_leftovers(folder)
            wanted = shape_of(capacity_bytes, place_bytes, block_tokens)
            self.segment = Segment.attach(segment_path(name, folder), wanted)
        except (SegmentError, OSError) as error:
            self.note = str(error)
            self.counters.errors += 1
            return
        self.table = BlockTable(self.segment)

    def refresh(self, identity: bytes) -> None:
        segment = self._usable()
        if segment is None:
            return
        now = self.table.read_number(SEQUENCE_AT)
        places = segment.shape.places
        if now == self._seen:
            return
        if now < self._seen or now - self._seen > places:
            held = np.flatnonzero(self.table.occupied())
        else:
            held = self.table.log[np.arange(self._seen, now, dtype=np.uint64) % np.uint64(places)]
        for place in held.tolist():
            if place < places:
                self._index[self.table.key_at(place)] = place
        self._seen = now
        if len(self._index) > 4 * places:  # mostly of places that hold others by now
            self._index = {self.table.key_at(p): p for p in np.flatnonzero(self.table.occupied()).tolist()}

    def holds(self, key: BlockKey) -> bool:
        place = self._index.get(key.key)
        if place is None or self._usable() is None:
            return False
        if self.table.generation(place) % 2 or not self.table.is_named(place, key):
            self._index.pop(key.key, None)
            return False
        return True

    def offer(self, key: BlockKey, loading: Loading, stored: int, taken: int, first: int) -> _Place | None:
        place = self._index.get(key.key)
        if place is None or self._usable() is None:
            return None
        generation = self.table.generation(place)
        entry = self.table.entries[place]
        if (
            generation == 0
            or generation % 2
            or not self.table.is_named(place, key)
            or int(entry["nbytes"]) != stored * loading.layout.row_bytes
        ):
            self._index.pop(key.key, None)
            return None
        loading.add_flat(self.table.base + self.table.data_at(place), stored, taken, first)
        return _Place(place, generation, kind_of(int(entry["kind"])), float(entry["last_used"]))

    def ready(self, tickets: Sequence[object]) -> bool:
        return True

    def confirm(self, key: BlockKey, ticket: object, status: int, sums: np.ndarray, size: int) -> bool:
        assert isinstance(ticket, _Place)
        entry = self.table.entries[ticket.place]
        fingerprint = entry["fingerprint"].tobytes()
        if self.table.generation(ticket.place) != ticket.generation:
            self.counters.misses += 1  # replaced while it was read
        elif digest_of_sums(sums, size, key.key) != fingerprint:
            self.counters.corrupt += 1
            self._forget(ticket)
        else:
            self.counters.hits += 1
            now = self._clock()
            entry["last_used"] = now
            entry["expected"] = 0.0
            return True
        self._index.pop(key.key, None)
        return False

    def write(self, blocks: Sequence[NewBlock]) -> int:
        segment = self._usable()
        if segment is None:
            return 0
        fitting = [block for block in blocks if self._fits(block)]
        self.counters.full += len(blocks) - len(fitting)
        with self._guard:
            if not locks.lock(segment.file, WRITER, exclusive=True, timeout_s=_WRITE_TIMEOUT_S):
                self.counters.late += len(fitting)
                return 0
            try:
                return self._write_locked(segment, fitting)
            finally:
                locks.unlock(segment.file, WRITER)

    def flush(self) -> bool:
        return True

    def pin(self, keys: Sequence[BlockKey], until: float) -> list[object]:
        """A lease takes one of a block's few pins; where all are taken the lease ends before that block."""
        handles: list[object] = []
        segment = self._usable()
        if segment is None:
            return handles
        with self._guard:
            if not locks.lock(segment.file, WRITER, exclusive=True, timeout_s=_WRITE_TIMEOUT_S):
                self.counters.late += 1
                return handles
            try:
                self.refresh(b"")
                now = self._clock()
                for key in keys:
                    if not self.holds(key):
                        break
                    place = self._index[key.key]
                    free = np.flatnonzero(~self.table.pinned(now)[place])
                    if not len(free):
                        break
                    self.table.entries["pins"][place, free[0]] = until
                    handles.append((place, int(free[0]), self.table.generation(place), until))
            finally:
                locks.unlock(segment.file, WRITER)
        return handles

    def unpin(self, handles: Sequence[object]) -> None:
        if self._usable() is None:
            return
        for place, pin, generation, until in handles:  # type: ignore[misc, attr-defined]
            if self.table.generation(place) == generation and self.table.entries["pins"][place, pin] == until:
                self.table.entries["pins"][place, pin] = 0.0

    def relabel(self, keys: Sequence[BlockKey], old: Kind, new: Kind) -> None:
        for key in keys:
            if self.holds(key) and self.table.entries["kind"][self._index[key.key]] == old:
                self.table.entries["kind"][self._index[key.key]] = new

    def expect(self, keys: Sequence[BlockKey], when: float) -> None:
        for key in keys:
            if self.holds(key):
                self.table.entries["expected"][self._index[key.key]] = when

    def retire(self, identity: bytes) -> None:
        self._retired.add(identity)

    def evict(self, nbytes: int) -> int:
        segment = self._usable()
        if segment is None:
            return 0
        with self._guard:
            if not locks.lock(segment.file, WRITER, exclusive=True, timeout_s=_WRITE_TIMEOUT_S):
                self.counters.late += 1
                return 0
            try:
                victims = self._victims(-(-nbytes // segment.shape.place_bytes))
                freed = int(self.table.entries["nbytes"][victims].sum())
                self._drop(victims)
            finally:
                locks.unlock(segment.file, WRITER)
        return freed

    def stats(self) -> TierStats:
        segment = self._usable()
        if segment is None:
            return TierStats(self.name, 0, 0, 0, self.counters, self.note)
        held = self.table.occupied()
        nbytes = int(np.minimum(self.table.entries["nbytes"][held], segment.shape.place_bytes).sum())
        return TierStats(self.name, int(held.sum()), nbytes, segment.shape.size, self.counters, self.note)

    def take_out(self, identity: bytes) -> list[FlatBlock]:
        """Copies of all blocks of an identity, for the next tier."""
        segment = self._usable()
        if segment is None:
            return []
        return [
            taken
            for place in np.flatnonzero(self.table.occupied()).tolist()
            if (taken := self.table.copy_out(place)) is not None and taken.key.identity == identity
        ]

    def close(self) -> None:
        segment, self.segment = self.segment, None
        if segment is None:
            return
        self.note = self.note or "closed"
        self._index.clear()
        self.table.close()
        segment.close()

    def _usable(self) -> Segment | None:
        segment = self.segment
        if segment is not None and not segment.intact:
            self.note = "its file was cut short"
            self.counters.errors += 1
            # Its memory stays mapped: somebody may hold a view. Nothing reads it again.
            self.segment = None
            self._index.clear()
            return None
        return segment

    def _fits(self, block: NewBlock) -> bool:
        assert self.segment is not None
        size = sum(tensor.numel() * tensor.element_size() for tensor in block.tensors)
        shape = self.segment.shape
        return size <= shape.place_bytes and len(block.key.tokens) <= 4 * shape.block_tokens

    def _write_locked(self, segment: Segment, blocks: Sequence[NewBlock]) -> int:
        self.refresh(b"")
        new = [block for block in blocks if not self.holds(block.key)]
        here = len(blocks) - len(new)
        keep = self._with_ancestors(blocks)
        places = self._make_room(segment, len(new), keep)
        self.counters.full += len(new) - len(places)
        # The first blocks of a chain, if not all: the others are of no use without them.
        new = new[: len(places)]
        for place, block in zip(places, new, strict=True):
            entry = self.table.entries[place]
            entry["generation"] = (int(entry["generation"]) | 1) + 2 & 0xFFFFFFFFFFFFFFFF
            entry["name"] = self.table.name(block.key)
            entry["index"], entry["kind"], entry["reach"] = block.key.index, block.kind, block.reach
            entry["ntokens"] = len(block.key.tokens) // 4
            entry["nbytes"] = sum(t.numel() * t.element_size() for t in block.tensors)
            entry["expected"], entry["pins"] = 0.0, 0.0
        sums = store(
            [b.tensors for b in new], [self.table.base + self.table.data_at(place) for place in places]
        )
        now = self._clock()
        sequence = self.table.read_number(SEQUENCE_AT)
        for place, block, of_block in zip(places, new, sums, strict=True):
            entry = self.table.entries[place]
            entry["fingerprint"] = np.void(digest_of_sums(of_block, int(entry["nbytes"]), block.key.key))
            entry["last_used"] = now
            entry["generation"] = int(entry["generation"]) + 1 & 0xFFFFFFFFFFFFFFFF
            self.table.log[sequence % segment.shape.places] = place
            sequence += 1
            self._index[block.key.key] = place
        self.table.write_number(SEQUENCE_AT, sequence)
        self._seen = sequence
        self.counters.stored += len(new)
        return here + len(new)

    def _with_ancestors(self, blocks: Sequence[NewBlock]) -> set[int]:
        """The places of these blocks and of those before them in their chains, which they are of no use without."""
        keep: set[int] = set()
        for block in blocks:
            for key in (block.key.key, block.key.parent):
                while (place := self._index.get(key)) is not None and place not in keep:
                    if self.table.key_at(place) != key:
                        break
                    keep.add(place)
                    key = self.table.parent_at(place)
        return keep

    def _make_room(self, segment: Segment, count: int, keep: set[int]) -> list[int]:
        """Up to `count` free places: never used ones, free ones, then the least valuable ones."""
        places = segment.shape.places
        reserved = min(self.table.read_number(RESERVED_AT), places)
        occupied = self.table.occupied()
        free = np.flatnonzero(~occupied[:reserved])[:count].tolist()
        while len(free) < count and reserved < places:
            more = min(_RESERVE_PLACES, places - reserved)
            try:
                segment.reserve(reserved + more)
            except OSError as error:
                self.note = f"memory is full: {reason(error)}"
                break
            free.extend(range(reserved, reserved + min(more, count - len(free))))
            reserved += more
            self.table.write_number(RESERVED_AT, reserved)
        missing = count - len(free)
        if missing > 0:
            victims = self._victims(max(missing, places // _EVICT_SHARE), keep)
            self._drop(victims)
            free.extend(victims[:missing].tolist())
        return free

    def _victims(self, count: int, keep: set[int] | None = None) -> np.ndarray:
        """Up to `count` places, the least valuable ones first; none that is pinned or in `keep`."""
        now = self._clock()
        candidates = self.table.occupied() & ~self.table.pinned(now).any(axis=1)
        if keep:
            candidates[list(keep)] = False
        places = np.flatnonzero(candidates)
        values = self.policy.values(now, self.table.facts(places, now))
        if self._retired:
            dead = [entry["name"].tobytes()[:16] in self._retired for entry in self.table.entries[places]]
            values = np.where(dead, -np.inf, values)
        return places[np.argsort(values, kind="stable")[:count]]

    def _drop(self, places: np.ndarray) -> None:
        if self.demote is not None:
            taken = [self.table.copy_out(place) for place in places.tolist()]
            self.demote([t for t in taken if t is not None and t.key.identity not in self._retired])
        for place in places.tolist():
            self._index.pop(self.table.key_at(place), None)
        self.table.entries["generation"][places] |= np.uint64(1)
        self.counters.evicted += len(places)

    def _forget(self, ticket: _Place) -> None:
        """Free a place whose content is not what its entry says, unless somebody is writing."""
        assert self.segment is not None
        with self._guard:
            if locks.try_lock(self.segment.file, WRITER, exclusive=True):
                if self.table.generation(ticket.place) == ticket.generation:
                    self.table.entries["generation"][ticket.place] |= np.uint64(1)
                locks.unlock(self.segment.file, WRITER)
