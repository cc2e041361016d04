"""Finding the KV of tokens over all tiers, and copying it into a slot.

Invariants
* What `load` reports is in the slot bit for bit: each tier confirmed it after it was copied.
* It is always a whole prefix: behind the first block that fails nothing counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.copying import BlockLayout, Loading
from headrace.state.eviction import EvictionPolicy, Kind
from headrace.state.kv import Block, KVIdentity, PrefixCache
from headrace.state.tiers.base import DIGEST, BlockKey, Counters, NewBlock, Tier, block_keys, digest_of_parts

_KNOWN_CHAINS = 512
"""Token sequences whose keys are remembered."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was put into a slot: the first `length` tokens."""

    length: int
    waiting: bool = False
    """Some of it was kept for a session's next turn."""


@dataclass(slots=True)
class Hit:
    """One block of a prefix: on the device (`block`), or in a tier under a key. `taken` leading rows of it count."""

    first: int
    taken: int
    block: Block | None
    tier: Tier | None
    key: BlockKey | None


class Lookup:
    """Finds blocks in the device's tree and in the tiers below it."""

    def __init__(
        self,
        cache: PrefixCache,
        tiers: Sequence[Tier],
        layout: BlockLayout,
        policy: EvictionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.cache = cache
        self.tiers = list(tiers)
        self.layout = layout
        self.device = Counters()
        self._policy = policy
        self._clock = clock
        self._digests: dict[tuple[KVIdentity, int], bytes] = {}
        self._chains: dict[tuple[bytes, tuple[int, ...]], list[BlockKey]] = {}

    def find(self, identity: KVIdentity, tokens: Sequence[int], limit: int) -> list[Hit]:
        """The blocks of the longest prefix, each from the nearest tier that holds it."""
        if not self.cache.capacity_bytes:
            return []
        size = self.cache.block_size
        node = self.cache.root(identity)
        keys: list[BlockKey] | None = None
        hits: list[Hit] = []
        position = 0
        while position < limit:
            window = tuple(tokens[position : position + size])
            child = node.children.get(window) if node is not None else None
            index = position // size
            if child is not None and child.resident:
                hit = Hit(position, min(len(window), limit - position), child, None, None)
            else:
                if keys is None and self.tiers and len(window) == size:
                    keys = self.keys(identity, tokens)
                    for tier in self.tiers:
                        tier.refresh(self.digest(identity))
                tier_holds = None
                if keys is not None and index < len(keys):
                    tier_holds = next((tier for tier in self.tiers if tier.holds(keys[index])), None)
                if tier_holds is not None:
                    assert keys is not None
                    hit = Hit(position, min(size, limit - position), None, tier_holds, keys[index])
                elif node is not None:
                    child, matched = self.cache.best_child(node, window)
                    if child is None:
                        break
                    hit = Hit(position, min(matched, limit - position), child, None, None)
                else:
                    break
            hits.append(hit)
            position += hit.taken
            if hit.taken < size:
                break
            node = child
        return hits

    def load(self, hits: Sequence[Hit], views: Sequence[Tensor]) -> tuple[Restored, bool]:
        """Copy hits into a slot; what of them is true, and whether that is all of them."""
        size = self.cache.block_size
        loading = Loading(self.layout)
        tickets: list[object] = []
        for hit in hits:
            if hit.block is not None:
                loading.add_tensors(hit.block.data, hit.taken, hit.first)
                tickets.append(None)
                continue
            assert hit.tier is not None
            assert hit.key is not None
            ticket = hit.tier.offer(hit.key, loading, size, hit.taken, hit.first)
            if ticket is None:
                hits = hits[: len(tickets)]
                complete = False
                break
            tickets.append(ticket)
        else:
            complete = True
        status, sums = loading.load(views, nowait=True)
        cold = [i for i, state in enumerate(status) if state in Loading.COLD]
        if cold:
            status, sums = self._load_cold(hits, tickets, status, sums, cold, views)
        length, waiting = 0, False
        used: list[Block] = []
        lower: list[tuple[Kind, float]] = []
        now = self._clock()
        for hit, ticket, state, block_sums in zip(hits, tickets, status, sums, strict=True):
            if hit.block is not None:
                used.append(hit.block)
                waiting |= hit.block.kind == Kind.WAITING
                self.device.hits += 1
            else:
                assert hit.tier is not None
                assert hit.key is not None
                assert ticket is not None
                if not hit.tier.confirm(hit.key, ticket, state, block_sums, size * self.layout.row_bytes):  # type: ignore[arg-type]
                    complete = state in Loading.COLD and complete
                    break
                lower.append((ticket.kind, ticket.last_used))  # type: ignore[attr-defined]
                waiting |= ticket.kind == Kind.WAITING  # type: ignore[attr-defined]
            length += hit.taken
        self.cache.use(used, length)
        for kind, last_used in lower:
            self._policy.reused(kind, 1, max(now - last_used, 0.0) if np.isfinite(last_used) else 0.0)
        return Restored(length, waiting), complete

    def _load_cold(
        self,
        hits: Sequence[Hit],
        tickets: Sequence[object],
        status: list[int],
        sums: list[np.ndarray],
        cold: Sequence[int],
        views: Sequence[Tensor],
    ) -> tuple[list[int], list[np.ndarray]]:
        """Let the tier bring cold blocks near, and load them again."""
        tier = hits[cold[0]].tier
        assert tier is not None
        if not tier.ready([tickets[i] for i in cold]):  # type: ignore[misc]
            return status, sums
        unsure = any(status[i] == Loading.UNKNOWN for i in cold)
        again = Loading(self.layout)
        size = self.cache.block_size
        offered = [
            i
            for i in cold
            if tier.offer(hits[i].key, again, size, hits[i].taken, hits[i].first) is not None  # type: ignore[arg-type]
        ]
        # Where the file system cannot tell what is in memory, this trusts that it still is.
        states, block_sums = again.load(views, nowait=not unsure)
        for i, state, of_block in zip(offered, states, block_sums, strict=True):
            status[i], sums[i] = state, of_block
        return status, sums

    def fetch(self, tier: Tier, keys: Sequence[BlockKey], reach: int) -> list[NewBlock]:
        """Copies of the leading ones of these blocks that a tier holds, confirmed."""
        size = self.cache.block_size
        held = next((i for i, key in enumerate(keys) if not tier.holds(key)), len(keys))
        views = [
            torch.empty(planes, held * size, width, dtype=self.layout.dtype)
            for planes, width in self.layout.buffers
        ]
        hits = [Hit(i * size, size, None, tier, key) for i, key in enumerate(keys[:held])]
        restored, _ = self.load(hits, views)
        kind = Kind.WAITING if restored.waiting else Kind.SHARED
        return [
            NewBlock(key, [view[:, i * size : (i + 1) * size] for view in views], kind, reach)
            for i, key in enumerate(keys[: restored.length // size])
        ]

    def digest(self, identity: KVIdentity) -> bytes:
        """The name of an identity in lower tiers."""
        size = self.cache.block_size
        digest = self._digests.get((identity, size))
        if digest is None:
            text = repr((tuple(identity), self.layout.buffers, str(self.layout.dtype), size))
            digest = hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()
            self._digests[identity, size] = digest
        return digest

    def keys(self, identity: KVIdentity, tokens: Sequence[int]) -> list[BlockKey]:
        """The keys of all full blocks of `tokens`."""
        chain = (self.digest(identity), tuple(tokens))
        keys = self._chains.get(chain)
        if keys is None:
            if len(self._chains) >= _KNOWN_CHAINS:
                self._chains.clear()
            keys = self._chains[chain] = block_keys(*chain, self.cache.block_size)
        return keys

    def key(self, identity: KVIdentity, block: Block) -> bytes:
        """The key alone."""
        return self.block_key(identity, block).key

    def block_key(self, identity: KVIdentity, block: Block) -> BlockKey:
        """The key of a full block of the device's tree."""
        digest = self.digest(identity)
        parent = bytes(DIGEST)
        if block.parent is not None and block.parent.parent is not None:
            parent = block.parent.key or self.key(identity, block.parent)
        packed = np.asarray(block.tokens, dtype="<i4").tobytes()
        block.key = block.key or digest_of_parts(digest, parent, packed)
        return BlockKey(digest, block.key, parent, packed, block.depth // self.cache.block_size)
