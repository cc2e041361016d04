"""What a place for blocks of KV must do, so that the directory need not know what it is.

A block is found by its *key*: the digest of its identity, its parent's key and its own tokens. So every process and
every run that computes the same KV names it alike, and a block is only reachable through all tokens before it.

Invariants of every tier
* What is loaded and confirmed is bit for bit what was stored under that key; all else is a miss.
* No operation raises for a failure of the place itself (missing, damaged, full, slow): it is counted in `counters`.
* A pinned block is not evicted before the pin's deadline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from headrace.kernels.copying import Loading
from headrace.state.eviction import Kind

DEVICE, HOST, DISK = "device", "host", "disk"
"""Names of the tiers, the fastest first."""

DIGEST = 16
"""Bytes of an identity's digest and of a key."""

LONGEST_PIN_S = 86_400.0
"""A deadline further away than this is damage."""


class BlockKey(NamedTuple):
    """The name of one full block, and what it is made of."""

    identity: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    """int32, little-endian."""
    index: int
    """Blocks before it in its chain."""

    @property
    def consistent(self) -> bool:
        """Whether the key is the one of its parts."""
        return self.key == digest_of_parts(self.identity, self.parent, self.tokens)


def digest_of_parts(identity: bytes, parent: bytes, tokens: bytes) -> bytes:
    """The key of a block."""
    return hashlib.blake2b(identity + parent + tokens, digest_size=DIGEST).digest()


def block_keys(identity: bytes, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
    """The keys of all full blocks of `tokens`."""
    return keys_after(identity, bytes(DIGEST), 0, tokens, block_size)


def keys_after(
    identity: bytes, parent: bytes, index: int, tokens: Sequence[int], block_size: int
) -> list[BlockKey]:
    """The keys of the full blocks of `tokens` behind block number `index - 1`, whose key is `parent`."""
    packed = np.asarray(tokens, dtype="<i4").tobytes()
    size = 4 * block_size
    keys = []
    for start in range(0, len(packed) - size + 1, size):
        part = packed[start : start + size]
        key = digest_of_parts(identity, parent, part)
        keys.append(BlockKey(identity, key, parent, part, index))
        parent, index = key, index + 1
    return keys


class NewBlock(NamedTuple):
    """A full block to be stored: one tensor [planes, tokens, D] per buffer."""

    key: BlockKey
    tensors: Sequence[Tensor]
    kind: Kind
    reach: int
    """Tokens of the longest chain that was used through it."""


class FlatBlock(NamedTuple):
    """A full block on its way between lower tiers. Its fingerprint goes with it, so damage stays visible."""

    key: BlockKey
    flat: np.ndarray
    """Its bytes [size], uint8, laid out as `Loading.add_flat` says."""
    fingerprint: bytes
    """Of the bytes, with the key as context."""
    kind: Kind
    reach: int


@dataclass(slots=True)
class Counters:
    """What happened at a tier, in blocks (`errors`: in operations)."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    late: int = 0
    """Not there before the deadline."""
    corrupt: int = 0
    """Found, but not what was stored."""
    full: int = 0
    """Not stored for want of room."""
    errors: int = 0
    """The system refused."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's contents and counters."""

    name: str
    blocks: int
    nbytes: int
    capacity_bytes: int
    counters: Counters
    note: str = ""
    """Why it is switched off, if it is."""

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        return data | data.pop("counters")


class Ticket(Protocol):
    """One block that is being loaded."""

    kind: Kind
    last_used: float


class Tier(Protocol):
    """A place below the device. A remote store fits too: `offer` then names memory into which it fetched the block."""

    name: str
    counters: Counters

    def refresh(self, identity: bytes) -> None:
        """Learn of blocks of this identity that others stored."""
        ...

    def holds(self, key: BlockKey) -> bool:
        """Whether the block seems to be here."""
        ...

    def offer(self, key: BlockKey, loading: Loading, stored: int, taken: int, first: int) -> Ticket | None:
        """Add the block to `loading` (see `Loading.add_flat`), or None if it is not here after all."""
        ...

    def ready(self, tickets: Sequence[Ticket]) -> bool:
        """Bring near what was not at hand when it was loaded; False when the deadline passed first."""
        ...

    def confirm(self, key: BlockKey, ticket: Ticket, status: int, sums: np.ndarray, size: int) -> bool:
        """Whether what was loaded is the block; counts the hit or what was wrong. A bad block is forgotten."""
        ...

    def write(self, blocks: Sequence[NewBlock]) -> int:
        """Store blocks, evicting less valuable ones; returns how many of them are here (or under way) now."""
        ...

    def flush(self) -> bool:
        """Wait until what is under way is here, or given up; False when that took too long."""
        ...

    def pin(self, keys: Sequence[BlockKey], until: float) -> list[object]:
        """Keep the leading blocks that are here until a time; one handle each."""
        ...

    def unpin(self, handles: Sequence[object]) -> None: ...

    def relabel(self, keys: Sequence[BlockKey], old: Kind, new: Kind) -> None:
        """Blocks of the kind `old` are now of the kind `new`."""
        ...

    def expect(self, keys: Sequence[BlockKey], when: float) -> None:
        """The blocks' session is expected back at a time."""
        ...

    def retire(self, identity: bytes) -> None:
        """Nobody will ask for this identity here again; its blocks may go first."""
        ...

    def evict(self, nbytes: int) -> int:
        """Give up at least so many bytes of the least valuable blocks if they are there; returns how many."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...
