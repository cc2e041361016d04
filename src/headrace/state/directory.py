"""Where KV lies: one tree of blocks over the device, host memory that processes share, and disk.

The device's tier is the `PrefixCache`. Below it lie `Tier`s, which find full blocks by their keys, so also those that
other processes and earlier runs stored. What must leave a tier goes to the next one below if it is worth a copy.

Invariants
* What `restore` says is in the slot is bit for bit the KV of those tokens under that identity: it was confirmed by
  the tier, after it was copied.
* Any failure of a tier ends in a shorter match. None raises.
* Blocks of another identity are never found: the identity is part of every key. `retire` drops the device's at once.
* A lease ends at its deadline, whether or not its holder lives.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headrace.kernels.copying import BlockLayout
from headrace.state.eviction import EvictionPolicy, Kind, LeastRecentlyUsed
from headrace.state.kv import Block, KVIdentity, PrefixCache, facts_of
from headrace.state.lookup import Lookup, Restored
from headrace.state.tiers.base import (
    DEVICE,
    BlockKey,
    FlatBlock,
    NewBlock,
    Tier,
    TierStats,
)
from headrace.state.tiers.disk import DiskTier
from headrace.state.tiers.shared import SharedTier

BRING_BACK_LEAD_S = 1.0
"""So long before a session is expected its KV is brought near."""
BRING_BACK_BLOCKS = 16
"""Blocks that one `tick` moves at most: it runs between two engine steps."""
_ATTEMPTS = 3
_FORGET_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """So many leading tokens can be had from a tier by itself."""

    tier: str
    matched_length: int


@dataclass(slots=True)
class Lease:
    """So many (`length`) of the tokens stay in `tier` until `until` (of the directory's clock), or until `unpin`."""

    tier: str
    length: int
    until: float
    handles: list[object] = field(default_factory=list)


@dataclass(slots=True)
class _Expected:
    identity: KVIdentity
    tokens: tuple[int, ...]
    when: float
    warmed: bool = False


class Directory:
    """The KV of one engine, wherever it is.

    Args:
        cache_bytes: the device tier's size; 0 keeps nothing anywhere.
        layout: what a token's rows are made of.
        host, disk: the lower tiers, if there are any.
        policy: shared by all tiers.
        clock: seconds since the epoch.
        copies_equal_memory: the device is the CPU, so that a block in host memory needs no copy in the device tier.
    """

    def __init__(
        self,
        cache_bytes: int,
        layout: BlockLayout,
        *,
        block_size: int = 16,
        host: SharedTier | None = None,
        disk: DiskTier | None = None,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.time,
        copies_equal_memory: bool = True,
    ) -> None:
        self.layout = layout
        self.policy = policy or LeastRecentlyUsed()
        self.clock = clock
        self.cache = PrefixCache(
            cache_bytes,
            block_size,
            policy=self.policy,
            clock=clock,
            evicted=_weakly(self._demote_from_device),
        )
        self.host = host
        self.disk = disk
        lower: list[Tier] = [tier for tier in (host, disk) if tier is not None]
        self._lookup = Lookup(self.cache, lower, layout, self.policy, clock)
        self.identity = KVIdentity("", "", "", "")
        """What `tokens` mean where no `weights_id` is given."""
        self._skip_device = copies_equal_memory
        self._retired: set[KVIdentity] = set()
        self._expected: dict[bytes, _Expected] = {}
        if host is not None and disk is not None:
            host.demote = _weakly(self._demote_from_host)

    @property
    def tiers(self) -> list[Tier]:
        """Those below the device, the fastest first."""
        return self._lookup.tiers

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self.cache.capacity_bytes > 0

    def locate(self, tokens: Sequence[int], weights_id: str | None = None) -> list[Place]:
        """Where the KV of `tokens` lies: per tier that holds some of its beginning, how many tokens."""
        identity = self._named(weights_id)
        places = [Place(DEVICE, self.cache.matched_length(identity, tokens))]
        keys = self._lookup.keys(identity, tokens) if self.tiers else []
        for tier in self.tiers:
            tier.refresh(self._lookup.digest(identity))
            held = next((i for i, key in enumerate(keys) if not tier.holds(key)), len(keys))
            places.append(Place(tier.name, held * self.cache.block_size))
        return [place for place in places if place.matched_length]

    def matched_length(self, tokens: Sequence[int], limit: int | None = None) -> int:
        """How many leading tokens `restore` would find over all tiers; counts as no use."""
        limit = len(tokens) if limit is None else limit
        return sum(hit.taken for hit in self._lookup.find(self.identity, tokens, limit))

    def restore(self, tokens: Sequence[int], views: Sequence[Tensor], limit: int | None = None) -> Restored:
        """Copy the longest prefix that any tiers hold into a slot.

        Args:
            views: the slot, one tensor [planes, rows, D] per buffer. Rows behind the restored ones may be overwritten.
            limit: the most tokens to restore.
        """
        limit = len(tokens) if limit is None else limit
        restored = Restored(0)
        if not self.enabled:
            return restored
        for _ in range(_ATTEMPTS):
            hits = self._lookup.find(self.identity, tokens, limit)
            restored, complete = self._lookup.load(hits, views)
            if complete:
                break
        missed = (limit - restored.length) // self.cache.block_size
        for counters in (self._lookup.device, *(tier.counters for tier in self.tiers)):
            counters.misses += missed
        self.cache.queried_tokens += limit
        self.cache.hit_tokens += restored.length
        return restored

    def insert(
        self,
        tokens: Sequence[int],
        read: Callable[[int, int], list[Tensor]],
        kind: Kind = Kind.SHARED,
    ) -> None:
        """Keep the KV of `tokens`; see `PrefixCache.insert`."""
        if not self.enabled:
            return
        if not self.tiers:
            self.cache.insert(self.identity, tokens, read, kind=kind)
            return
        digest, keys = self._lookup.digest(self.identity), self._lookup.keys(self.identity, tokens)
        for tier in self.tiers:
            tier.refresh(digest)
        host = self.host

        def elsewhere(block: int) -> bool:
            return self._skip_device and host is not None and host.holds(keys[block])

        done = self.cache.insert(self.identity, tokens, read, kind=kind, elsewhere=elsewhere)
        # What the device has no room for goes below at once.
        size, below = self.cache.block_size, self.tiers[0]
        over = [key for key in keys[done // size :] if not below.holds(key)]
        if over and kind != Kind.FINISHED:
            below.write(
                [
                    NewBlock(key, read(key.index * size, key.index * size + size), kind, len(tokens))
                    for key in over
                ]
            )

    def pin(self, tokens: Sequence[int], tier: str, seconds: float, weights_id: str | None = None) -> Lease:
        """Keep what a tier holds of `tokens` there for a time; `length` says how many tokens that is."""
        identity = self._named(weights_id)
        until = self.clock() + seconds
        if tier == DEVICE:
            lease = Lease(tier, 0, until)
            for block, matched in self.cache.along(identity, tokens):
                block.pins.append(until)
                lease.handles.append(block)
                lease.length += matched
            return lease
        target = self._tier(tier)
        target.refresh(self._lookup.digest(identity))
        handles = target.pin(self._lookup.keys(identity, tokens), until)
        return Lease(tier, len(handles) * self.cache.block_size, until, handles)

    def unpin(self, lease: Lease) -> None:
        """End a lease before its deadline; again is harmless."""
        if lease.tier == DEVICE:
            for block in lease.handles:
                assert isinstance(block, Block)
                if lease.until in block.pins:
                    block.pins.remove(lease.until)
        else:
            self._tier(lease.tier).unpin(lease.handles)
        lease.handles, lease.length = [], 0

    def migrate(
        self,
        tokens: Sequence[int],
        source: str,
        target: str,
        *,
        weights_id: str | None = None,
        keep: bool = False,
        most: int | None = None,
    ) -> int:
        """Bring the full blocks of `tokens` from one tier into another.

        Args:
            keep: leave them in the source too. (Disk keeps them in any case: its files hold other blocks as well.)
            most: blocks to move at most.

        Returns:
            How many leading tokens the target holds now.
        """
        identity = self._named(weights_id)
        keys = self._lookup.keys(identity, tokens)
        if target == DEVICE:
            return self._to_device(identity, tokens, keys, source, most)
        receiver = self._tier(target)
        receiver.refresh(self._lookup.digest(identity))
        missing = [key for key in keys if not receiver.holds(key)][:most]
        if source == DEVICE:
            found = {self._lookup.key(identity, b): b for b, _ in self.cache.along(identity, tokens)}
            moved = [
                (found[key.key], NewBlock(key, found[key.key].data, found[key.key].kind, len(tokens)))
                for key in missing
                if key.key in found
            ]
            receiver.write([new for _, new in moved])
            receiver.flush()
            receiver.refresh(self._lookup.digest(identity))
            if not keep:
                # From the end: a block leaves before its ancestors.
                for key in reversed(keys):
                    block = found.get(key.key)
                    if block is not None and receiver.holds(key) and not self.cache.pinned(block):
                        self.cache.remove(identity, block)
        else:
            receiver.write(self._lookup.fetch(self._tier(source), missing, len(tokens)))
            receiver.flush()
            receiver.refresh(self._lookup.digest(identity))
        held = next((i for i, key in enumerate(keys) if not receiver.holds(key)), len(keys))
        return held * self.cache.block_size

    def evict(self, tier: str, nbytes: int) -> int:
        """Give up at least `nbytes` of a tier, the least valuable first, if so much can go; returns how many bytes."""
        return self.cache.evict(nbytes) if tier == DEVICE else self._tier(tier).evict(nbytes)

    def expect(self, tokens: Sequence[int], seconds: float) -> None:
        """The session with these tokens is expected back in `seconds`: `tick` brings its KV near before."""
        if not self.enabled:
            return
        when = self.clock() + seconds
        for block, _ in self.cache.along(self.identity, tokens):
            block.expected = when
        keys = self._lookup.keys(self.identity, tokens)
        for tier in self.tiers:
            tier.expect(keys, when)
        if keys and self.tiers:
            self._expected[keys[-1].key] = _Expected(self.identity, tuple(tokens), when)

    def finish(self, tokens: Sequence[int]) -> None:
        """The session with these tokens has ended: what was kept for its next turn may go."""
        if not self.enabled:
            return
        for block, _ in self.cache.along(self.identity, tokens):
            if block.kind == Kind.WAITING:
                block.kind, block.expected = Kind.FINISHED, 0.0
        keys = self._lookup.keys(self.identity, tokens) if self.tiers else []
        for tier in self.tiers:
            tier.relabel(keys, Kind.WAITING, Kind.FINISHED)
        if keys:
            self._expected.pop(keys[-1].key, None)

    def tick(self) -> int:
        """Bring back a few blocks of the session that is expected next; returns how many tokens moved."""
        if not self._expected:
            return 0
        now = self.clock()
        self._expected = {
            key: item
            for key, item in self._expected.items()
            if item.identity == self.identity and now < item.when + _FORGET_S
        }
        due = [item for item in self._expected.values() if item.when - BRING_BACK_LEAD_S <= now]
        if not due or self.disk is None:
            return 0
        item = min(due, key=lambda item: item.when)
        near = self._near(item)
        if near is None:
            self._expected = {key: other for key, other in self._expected.items() if other is not item}
            return 0
        target = self.host.name if self.host is not None and self.host.segment is not None else DEVICE
        moved = self.migrate(item.tokens, self.disk.name, target, most=BRING_BACK_BLOCKS)
        if moved <= near:  # no progress: the target is full or the disk lost it
            item.when = -_FORGET_S
        return max(moved - near, 0)

    def retire(self, identity: KVIdentity) -> None:
        """Weights have changed: drop the device's old blocks. Lower tiers reclaim theirs when they need room."""
        self.cache.drop(identity)
        self._retired.add(identity)
        for tier in self.tiers:
            tier.retire(self._lookup.digest(identity))

    def stats(self) -> list[TierStats]:
        """Contents and counters of every tier, the device first."""
        self._lookup.device.evicted = self.cache.evictions
        held = sum(1 for _ in self.cache.blocks())
        device = TierStats(
            DEVICE, held, self.cache.used_bytes, self.cache.capacity_bytes, self._lookup.device
        )
        return [device, *(tier.stats() for tier in self.tiers)]

    def flush(self) -> None:
        """Put what is worth it on the disk, so that a later run finds it."""
        if self.disk is None:
            return
        self.disk.refresh(self._lookup.digest(self.identity))
        if self.host is not None:
            self._demote_from_host(self.host.take_out(self._lookup.digest(self.identity)))
        own = [(identity, b) for identity, b in self.cache.blocks() if identity == self.identity]
        self.disk.write(self._worth_keeping(own, self.disk))
        self.disk.flush()

    def close(self) -> None:
        """`flush`, and let go of everything; the directory keeps nothing afterwards."""
        self.flush()
        for tier in self.tiers:
            tier.close()
        self._lookup.tiers, self.host, self.disk = [], None, None
        self.cache.clear()
        self.cache.capacity_bytes = 0

    def _to_device(
        self,
        identity: KVIdentity,
        tokens: Sequence[int],
        keys: Sequence[BlockKey],
        source: str,
        most: int | None,
    ) -> int:
        size = self.cache.block_size
        here = self.cache.matched_length(identity, tokens) // size
        wanted = keys[here : None if most is None else here + most]
        run = self._lookup.fetch(self._tier(source), wanted, len(tokens))

        def read(start: int, stop: int) -> list[Tensor]:
            return [tensor.contiguous() for tensor in run[start // size - here].tensors]

        if run:
            self.cache.insert(identity, tokens[: (here + len(run)) * size], read, kind=run[0].kind)
        return self.cache.matched_length(identity, tokens[: len(keys) * size]) // size * size

    def _near(self, item: _Expected) -> int | None:
        """Leading tokens of a session that are nearer than the disk; None when nothing is to be brought."""
        hits = self._lookup.find(item.identity, item.tokens, len(item.tokens))
        for hit in hits:
            if hit.tier is self.disk:
                return hit.first
        return None

    def _demote_from_device(self, gone: list[tuple[KVIdentity, Block]]) -> None:
        below = self.tiers[0] if self.tiers else None
        if below is None:
            return
        below.refresh(self._lookup.digest(self.identity))
        new = self._worth_keeping([(i, b) for i, b in gone if i not in self._retired], below)
        if new:
            new.sort(key=lambda block: block.key.index)
            stored = below.write(new)
            if stored < len(new) and below is self.host and self.disk is not None:
                self.disk.write(new[stored:])

    def _worth_keeping(self, blocks: Sequence[tuple[KVIdentity, Block]], tier: Tier) -> list[NewBlock]:
        full = [(i, b) for i, b in blocks if len(b.tokens) == self.cache.block_size]
        if not full:
            return []
        worth = self.policy.worth_keeping(self.clock(), facts_of([block for _, block in full]))
        new = []
        for (identity, block), keep in zip(full, worth, strict=True):
            if keep:
                key = self._lookup.block_key(identity, block)
                if not tier.holds(key):
                    new.append(NewBlock(key, block.data, block.kind, block.reach))
        return new

    def _demote_from_host(self, blocks: list[FlatBlock]) -> None:
        if self.disk is not None:
            self.disk.write_flat([block for block in blocks if block.kind != Kind.FINISHED])

    def _named(self, weights_id: str | None) -> KVIdentity:
        return self.identity if weights_id is None else self.identity._replace(weights_id=weights_id)

    def _tier(self, name: str) -> Tier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join([DEVICE, *(tier.name for tier in self.tiers)])
        raise ValueError(f"there is no KV tier {name!r} here; there are: {known}")


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A method of an object that it does not keep alive: blocks would wait for the garbage collector otherwise."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        target = reference()
        if target is not None:
            target(argument)

    return call
