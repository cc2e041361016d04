"""The memory of the host tier: a table of entries, a log of what was stored, and the places themselves.

Nothing that is read here is trusted: whoever uses it compares names, generations and fingerprints.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np

from headrace.state.eviction import BlockFacts, Kind, finite
from headrace.state.tiers.base import LONGEST_PIN_S, BlockKey, FlatBlock
from headrace.state.tiers.segment import HEADER_BYTES, Segment, Shape

_PINS = 4
"""Leases that can hold one block at a time."""
_NUMBER = struct.Struct("<Q")
_MOST = 0xFFFFFFFFFFFFFFFF


def entry_type(block_tokens: int) -> np.dtype:
    """An entry of the table. `name` is identity, key, parent and tokens (zeros behind them)."""
    return np.dtype(
        [
            ("generation", "<u8"),
            ("name", f"V{48 + 4 * block_tokens}"),
            ("fingerprint", "V16"),
            ("nbytes", "<u8"),
            ("last_used", "<f8"),
            ("expected", "<f8"),
            ("pins", "<f8", (_PINS,)),
            ("index", "<u4"),
            ("reach", "<u4"),
            ("kind", "<u4"),
            ("ntokens", "<u4"),
        ]
    )


def shape_of(capacity_bytes: int, place_bytes: int, block_tokens: int) -> Shape:
    """A segment of at most `capacity_bytes`, with at least one place; its places lie on pages."""
    place_bytes = -(-place_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    entry = entry_type(block_tokens).itemsize + 8  # and its log
    places = max(1, (capacity_bytes - HEADER_BYTES - mmap.PAGESIZE) // (place_bytes + entry))
    data_at = -(-(HEADER_BYTES + places * entry) // mmap.PAGESIZE) * mmap.PAGESIZE
    return Shape(places, place_bytes, block_tokens, data_at, data_at + places * place_bytes)


class BlockTable:
    """Views of a segment: `entries` [places] as `entry_type` says, `log` [places] with the places last stored to."""

    def __init__(self, segment: Segment) -> None:
        shape = self.shape = segment.shape
        kind = entry_type(shape.block_tokens)
        self.entries = np.frombuffer(segment.map, dtype=kind, count=shape.places, offset=HEADER_BYTES)
        self.log = np.frombuffer(
            segment.map, dtype="<u8", count=shape.places, offset=HEADER_BYTES + shape.places * kind.itemsize
        )
        self._bytes = np.frombuffer(segment.map, dtype=np.uint8)
        self.base = self._bytes.ctypes.data
        self._names = memoryview(self._bytes)
        self._entry_bytes = kind.itemsize
        assert kind.fields is not None
        self._name_at = kind.fields["name"][1]
        self._name_bytes = kind["name"].itemsize

    def close(self) -> None:
        """Let go of the memory."""
        self._names.release()
        del self.entries, self.log, self._bytes

    def facts(self, places: np.ndarray, now: float) -> BlockFacts:
        """What a policy wants to know of the blocks in these places."""
        entries = self.entries[places]
        return BlockFacts(
            entries["kind"],
            finite(entries["last_used"], now),
            entries["reach"],
            entries["index"].astype(np.int64) * entries["ntokens"],
            finite(entries["expected"], now + LONGEST_PIN_S),
        )

    def occupied(self) -> np.ndarray:
        """Which places [places] hold a block."""
        generations = self.entries["generation"]
        return np.asarray((generations != 0) & (generations % np.uint64(2) == 0))

    def pinned(self, now: float) -> np.ndarray:
        """Which pins [places, pins] hold."""
        pins = self.entries["pins"]
        return np.asarray((pins > now) & (pins <= now + LONGEST_PIN_S))

    def copy_out(self, place: int) -> FlatBlock | None:
        """One block's name and a copy of its bytes; None if it is damaged or changed meanwhile."""
        entry = self.entries[place].copy()
        size, count = int(entry["nbytes"]), int(entry["ntokens"])
        if size > self.shape.place_bytes or count > self.shape.block_tokens:
            return None
        start = self.data_at(place)
        flat = self._bytes[start : start + size].copy()
        name = entry["name"].tobytes()
        key = BlockKey(name[:16], name[16:32], name[32:48], name[48 : 48 + 4 * count], int(entry["index"]))
        if self.generation(place) != int(entry["generation"]) or not key.consistent:
            return None
        return FlatBlock(
            key, flat, entry["fingerprint"].tobytes(), kind_of(int(entry["kind"])), int(entry["reach"])
        )

    def name(self, key: BlockKey) -> np.void:
        """The `name` of a block as an entry holds it."""
        return np.void((key.identity + key.key + key.parent + key.tokens).ljust(self._name_bytes, b"\0"))

    def is_named(self, place: int, key: BlockKey) -> bool:
        """Whether a place says that it holds this block."""
        start = HEADER_BYTES + place * self._entry_bytes + self._name_at
        name = (key.identity + key.key + key.parent + key.tokens).ljust(self._name_bytes, b"\0")
        return self._names[start : start + self._name_bytes] == name

    def key_at(self, place: int) -> bytes:
        """The key of the block that a place says it holds."""
        start = HEADER_BYTES + place * self._entry_bytes + self._name_at + 16
        return bytes(self._names[start : start + 16])

    def parent_at(self, place: int) -> bytes:
        """The key of that block's parent."""
        start = HEADER_BYTES + place * self._entry_bytes + self._name_at + 32
        return bytes(self._names[start : start + 16])

    def generation(self, place: int) -> int:
        """Of a place."""
        return int(_NUMBER.unpack_from(self._names, HEADER_BYTES + place * self._entry_bytes)[0])

    def data_at(self, place: int) -> int:
        """Where a place's bytes start in the segment."""
        return self.shape.data_at + place * self.shape.place_bytes

    def read_number(self, at: int) -> int:
        """A number of the header."""
        return int(_NUMBER.unpack_from(self._names, at)[0])

    def write_number(self, at: int, value: int) -> None:
        _NUMBER.pack_into(self._names, at, value & _MOST)


def kind_of(number: int) -> Kind:
    """The kind of a number that may be damaged."""
    return Kind(number) if number < len(Kind) else Kind.FINISHED
