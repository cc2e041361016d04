"""A KV tier in LMDB, as far as it takes to measure one: what the disk tier does with files, done with a B+ tree.

`blocks`: key -> fingerprint, identity, parent, tokens, bytes; `facts`: key -> last use, reach, index, kind. A hit
compares all that names the block, and its fingerprint, as the disk tier does. Reads copy from the map into the slot.

Invariants
* Nothing is synced, as the disk tier syncs nothing: what a crash of the machine leaves is for the fingerprints to tell.
* The map is no larger than the capacity, so the file never grows beyond it. Blocks get what is left of it after two
  batches: LMDB uses the pages of what was evicted again two transactions later.
* Which blocks go, the same policy says that the disk tier asks.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from headrace.kernels.copying import Loading, store
from headrace.kernels.fingerprint import digest_of_sums
from headrace.state.eviction import BlockFacts, EvictionPolicy, Kind
from headrace.state.tiers.base import BlockKey, Counters, NewBlock

PAGE = 4096
_DIGEST = 16
_LOCK_BYTES = 1 << 16
"""More than LMDB's own lock file takes."""
_FACTS = struct.Struct("<dIIB")


@dataclass(slots=True)
class _Ticket:
    kind: Kind
    last_used: float
    fingerprint: bytes


class LmdbTier:
    """One process's view of the store. `batch_bytes` is the most that one `write` is given."""

    name = "lmdb"

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        policy: EvictionPolicy,
        *,
        batch_bytes: int,
        writemap: bool,
    ) -> None:
        self.counters = Counters()
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self._room = capacity_bytes - 2 * batch_bytes
        self._env: Any = lmdb.open(
            str(folder),
            map_size=(capacity_bytes - _LOCK_BYTES) // PAGE * PAGE,
            max_dbs=2,
            sync=False,
            writemap=writemap,
            map_async=writemap,
        )
        self._blocks = self._env.open_db(b"blocks")
        self._facts = self._env.open_db(b"facts")
        self._buffer = np.empty(0, dtype=np.uint8)
        self._used: dict[bytes, float] = {}
        self._snapshot: Any = self._env.begin(db=self._blocks, buffers=True)

    def refresh(self, identity: bytes) -> None:
        """See what was written; until the next `refresh` or `write` what is found stays where it is."""
        self._snapshot.abort()
        self._snapshot = self._env.begin(db=self._blocks, buffers=True)

    def holds(self, key: BlockKey) -> bool:
        return self._snapshot.get(key.key) is not None

    def offer(self, key: BlockKey, loading: Loading, stored: int, taken: int, first: int) -> _Ticket | None:
        value = self._snapshot.get(key.key)
        head = _head(key)
        data_at = _DIGEST + len(head)
        if value is None or len(value) != data_at + stored * loading.layout.row_bytes:
            return None
        if value[_DIGEST:data_at] != head:
            return None
        address = np.frombuffer(value, dtype=np.uint8).ctypes.data
        loading.add_flat(address + data_at, stored, taken, first)
        return _Ticket(Kind.SHARED, self._used.get(key.key, 0.0), bytes(value[:_DIGEST]))

    def ready(self, tickets: Sequence[object]) -> bool:
        return True

    def confirm(self, key: BlockKey, ticket: _Ticket, status: int, sums: np.ndarray, size: int) -> bool:
        if status or digest_of_sums(sums, size, key.key) != ticket.fingerprint:
            self.counters.corrupt += 1
            return False
        self.counters.hits += 1
        self._used[key.key] = time.time()
        return True

    def write(self, blocks: Sequence[NewBlock]) -> int:
        self._snapshot.abort()
        need = sum(_pages(_value_bytes(block)) for block in blocks)
        with self._env.begin(write=True) as transaction:
            self._make_room(transaction, need)
        for attempt in range(2):
            try:
                with self._env.begin(write=True) as transaction:
                    written = sum(self._put(transaction, block) for block in blocks)
                self.counters.stored += written
                return written
            except lmdb.MapFullError:
                if attempt:
                    self.counters.full += len(blocks)
                else:  # in pieces too small for a block
                    with self._env.begin(write=True) as transaction:
                        self._evict(transaction, need)
        return 0

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self._snapshot.abort()
        self._env.close()

    def held(self) -> int:
        """How many blocks are in it."""
        with self._env.begin() as transaction:
            return int(transaction.stat(self._blocks)["entries"])

    def _put(self, transaction: Any, block: NewBlock) -> bool:
        key = block.key
        head, size = _head(key), _value_bytes(block)
        if transaction.get(key.key, db=self._facts) is not None:
            return False
        if self._buffer.size != size:
            self._buffer = np.empty(size, dtype=np.uint8)
        data_at = _DIGEST + len(head)
        (sums,) = store([block.tensors], [self._buffer.ctypes.data + data_at])
        fingerprint = digest_of_sums(sums, size - data_at, key.key)
        self._buffer[:data_at] = np.frombuffer(fingerprint + head, dtype=np.uint8)
        transaction.put(key.key, memoryview(self._buffer), db=self._blocks)
        facts = _FACTS.pack(time.time(), block.reach, key.index, int(block.kind))
        transaction.put(key.key, facts, db=self._facts)
        return True

    def _make_room(self, transaction: Any, need: int) -> None:
        stat = transaction.stat(self._blocks)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        over = pages * PAGE + need - self._room
        if over > 0:
            self._evict(transaction, over)

    def _evict(self, transaction: Any, nbytes: int) -> None:
        """Remove the least valuable blocks, at least so many bytes of them."""
        keys, rows = [], []
        with transaction.cursor(db=self._facts) as cursor:
            for key, packed in cursor:
                used, *rest = _FACTS.unpack(packed)
                keys.append(key)
                rows.append((max(used, self._used.get(key, 0.0)), *rest))
        if not keys:
            return
        used, reach, index, kind = (np.array(column) for column in zip(*rows, strict=True))
        facts = BlockFacts(kind, used, reach, index * 16, np.zeros(len(keys)))
        freed = 0
        for i in np.argsort(self.policy.values(time.time(), facts), kind="stable"):
            if freed >= nbytes:
                break
            freed += _pages(len(transaction.get(keys[i], db=self._blocks)))
            transaction.delete(keys[i], db=self._blocks)
            transaction.delete(keys[i], db=self._facts)
            self._used.pop(keys[i], None)
            self.counters.evicted += 1


def _head(key: BlockKey) -> bytes:
    return key.identity + key.parent + key.tokens


def _value_bytes(block: NewBlock) -> int:
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in block.tensors)
    return _DIGEST + len(_head(block.key)) + nbytes


def _pages(nbytes: int) -> int:
    """The bytes of the pages that a value of its own takes."""
    return -(-(nbytes + 16) // PAGE) * PAGE
