"""The prefix cache: blocks of KV found by what they are, never by where they came from.

A block's identity is the `KVIdentity` of its root (which weights, in which format, with which adapter, in which
layout) and the chain of tokens before it. Blocks form a tree: a node holds up to `block_size` tokens and, if it is
*resident*, the KV rows of exactly those tokens. The rows of a node that is not resident lie in a lower tier, where
the directory finds them by the same identity; such a node only leads to resident ones.

Invariants (`check_integrity`)
* A hit compares the tokens themselves, not only a hash of them.
* Blocks of different identities are never reachable from one another.
* `used_bytes` is the sum of the blocks' sizes and stays within `capacity_bytes`.
* Only the last block of a chain may be partly filled.
* Every leaf is resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from headrace.state.eviction import BlockFacts, EvictionPolicy, Kind, LeastRecentlyUsed


class KVIdentity(NamedTuple):
    """What KV belongs to. Two blocks may only be exchanged when all of this agrees."""

    weights_id: str
    weight_format: str
    adapter: str
    layout: str


@dataclass(eq=False, slots=True)
class Block:
    """A node of the tree. `data` is empty where it is not resident."""

    tokens: tuple[int, ...]
    data: list[Tensor]
    parent: Block | None
    depth: int = 0
    """Tokens before it."""
    kind: Kind = Kind.SHARED
    children: dict[tuple[int, ...], Block] = field(default_factory=dict)
    last_used: int = 0
    """The operation that used it last; `used_at` is when that was."""
    used_at: float = 0.0
    expected: float = 0.0
    reach: int = 0
    pins: list[float] = field(default_factory=list)
    """Deadlines of the leases on it."""
    key: bytes = b""
    """Its name in lower tiers, once somebody asked for it."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.data)

    @property
    def resident(self) -> bool:
        return bool(self.data)

    def touch(self, operation: int, now: float, reach: int) -> None:
        """Note a use."""
        self.last_used, self.used_at = operation, now
        self.reach = max(self.reach, reach)
        self.expected = 0.0


class PrefixCache:
    """Cached prefixes of one engine on its own device.

    Args:
        capacity_bytes: the most memory the blocks may take; 0 caches nothing.
        block_size: tokens per block.
        policy: decides what goes when there is no room; by default the least recently used.
        clock: seconds, for the policy and for leases; by default operations are counted.
        evicted: takes the blocks that had to go, with their identity, before their rows are dropped.
    """

    def __init__(
        self,
        capacity_bytes: int,
        block_size: int = 16,
        *,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] | None = None,
        evicted: Callable[[list[tuple[KVIdentity, Block]]], None] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.block_size = block_size
        self.policy = policy or LeastRecentlyUsed()
        self.used_bytes = 0
        self.hit_tokens = 0
        self.queried_tokens = 0
        self.evictions = 0
        self._evicted = evicted
        self._now = clock or (lambda: float(self._clock))
        self._roots: dict[KVIdentity, Block] = {}
        self._leaves: dict[Block, KVIdentity] = {}
        self._path: set[Block] = set()
        self._clock = 0

    def match(self, identity: KVIdentity, tokens: Sequence[int]) -> list[tuple[list[Tensor], int]]:
        """The longest cached prefix of `tokens` as (rows of one block, how many of them match), in order."""
        found = list(self.find(identity, tokens))
        self.use([block for block, _ in found], sum(matched for _, matched in found))
        self.queried_tokens += len(tokens)
        self.hit_tokens += sum(matched for _, matched in found)
        return [(block.data, matched) for block, matched in found]

    def matched_length(self, identity: KVIdentity, tokens: Sequence[int]) -> int:
        """How many leading tokens `match` would find; counts as no use."""
        return sum(matched for _, matched in self.find(identity, tokens))

    def root(self, identity: KVIdentity) -> Block | None:
        """Where the blocks of an identity hang."""
        return self._roots.get(identity)

    def best_child(self, node: Block, window: tuple[int, ...]) -> tuple[Block | None, int]:
        """The resident child that shares most leading tokens with `window`, and how many."""
        exact = node.children.get(window)
        if exact is not None and exact.resident:
            return exact, len(window)
        best, length = None, 0
        for tokens, child in node.children.items():
            if not child.resident:
                continue
            common = 0
            for ours, theirs in zip(window, tokens, strict=False):
                if ours != theirs:
                    break
                common += 1
            if common > length:
                best, length = child, common
        return best, length

    def use(self, blocks: Sequence[Block], reach: int) -> None:
        """Note that a chain of `reach` tokens was used through these blocks."""
        self._clock += 1
        now = self._now()
        for block in blocks:
            self.policy.reused(block.kind, 1, now - block.used_at)
            block.touch(self._clock, now, reach)

    def insert(
        self,
        identity: KVIdentity,
        tokens: Sequence[int],
        read: Callable[[int, int], list[Tensor]],
        *,
        kind: Kind = Kind.SHARED,
        elsewhere: Callable[[int], bool] | None = None,
    ) -> int:
        """Cache the KV of `tokens`.

        Args:
            read: `read(start, stop)` copies rows out, one tensor [planes, tokens, D] per buffer.
            kind: of the blocks that are new.
            elsewhere: whether the full block of a number lies in a lower tier, so that it needs no place here.

        Returns:
            How many tokens were dealt with before there was no room left.
        """
        if not self.capacity_bytes:
            return 0
        done = 0
        self._path.clear()
        self._clock += 1
        now = self._now()
        node = self._roots.setdefault(identity, Block((), [], None))
        for start in range(0, len(tokens), self.block_size):
            window = tuple(tokens[start : start + self.block_size])
            child = node.children.get(window)
            if child is None or not child.resident:
                full = len(window) == self.block_size
                data = [] if full and elsewhere and elsewhere(start // self.block_size) else None
                if data is None:
                    data = read(start, start + len(window))
                    if not self._make_room(_size(data), data, len(tokens) - start):
                        break
                child = self._place(identity, node, window, data, kind if child is None else child.kind)
            child.touch(self._clock, now, len(tokens))
            node = child
            self._path.add(child)
            done = start + len(window)
        self._path.clear()
        self._tidy(identity, node)
        return done

    def drop(self, identity: KVIdentity) -> None:
        """Forget every block of `identity`."""
        root = self._roots.pop(identity, None)
        if root is not None:
            for block in _walk(root):
                self.used_bytes -= block.nbytes
                self._leaves.pop(block, None)

    def clear(self) -> None:
        self._roots.clear()
        self._leaves.clear()
        self.used_bytes = 0

    def evict(self, nbytes: int) -> int:
        """Evict the least valuable leaves until `nbytes` are free that were not, if there are; returns how many."""
        self._clock += 1
        before = self.used_bytes
        self._evict_until(lambda: before - self.used_bytes >= nbytes)
        return before - self.used_bytes

    def remove(self, identity: KVIdentity, block: Block) -> None:
        """Drop a resident block's rows; others may still hang on it."""
        self.used_bytes -= block.nbytes
        block.data = []
        self._leaves.pop(block, None)
        self._tidy(identity, block)

    def blocks(self) -> Iterator[tuple[KVIdentity, Block]]:
        """All resident blocks, ancestors before descendants."""
        for identity, root in self._roots.items():
            for block in _walk(root):
                if block.resident:
                    yield identity, block

    def check_integrity(self) -> None:
        """Raise RuntimeError when an invariant of the tree does not hold."""
        total = 0
        for root in self._roots.values():
            for block in _walk(root):
                total += block.nbytes
                for key, child in block.children.items():
                    if child.parent is not block or child.tokens != key:
                        raise RuntimeError("prefix cache: a block hangs in the wrong place")
                    if child.children and len(child.tokens) != self.block_size:
                        raise RuntimeError("prefix cache: a partly filled block has children")
                    if any(tensor.shape[1] != len(child.tokens) for tensor in child.data):
                        raise RuntimeError("prefix cache: a block's rows do not match its tokens")
                    if not child.resident and not child.children:
                        raise RuntimeError("prefix cache: a leaf is not resident")
                    if child.resident and (child in self._leaves) != (not _resident_below(child)):
                        raise RuntimeError("prefix cache: the books of leaves are wrong")
        if total != self.used_bytes or total > self.capacity_bytes:
            raise RuntimeError(f"prefix cache: {self.used_bytes} bytes booked, {total} held")

    def find(self, identity: KVIdentity, tokens: Sequence[int]) -> Iterator[tuple[Block, int]]:
        """The resident blocks of the longest prefix, from its first block on, and how many tokens of each match."""
        node = self._roots.get(identity)
        position = 0
        while node is not None and position < len(tokens):
            node, matched = self.best_child(node, tuple(tokens[position : position + self.block_size]))
            if node is None:
                return
            yield node, matched
            position += matched
            if matched < self.block_size:
                return

    def along(self, identity: KVIdentity, tokens: Sequence[int]) -> Iterator[tuple[Block, int]]:
        """`find`, but it goes on past blocks that lie in lower tiers."""
        node = self._roots.get(identity)
        for start in range(0, len(tokens), self.block_size):
            if node is None:
                return
            window = tuple(tokens[start : start + self.block_size])
            child = node.children.get(window)
            if child is None:
                child, matched = self.best_child(node, window)
                if child is not None:
                    yield child, matched
                return
            if child.resident:
                yield child, len(window)
            node = child

    def _place(
        self, identity: KVIdentity, node: Block, window: tuple[int, ...], data: list[Tensor], kind: Kind
    ) -> Block:
        child = node.children.get(window)
        if child is None:
            child = node.children[window] = Block(window, [], node, node.depth + len(node.tokens), kind)
        if not data:
            return child
        child.data = data
        self.used_bytes += child.nbytes
        self.policy.stored(kind, 1)
        if not _resident_below(child):
            self._leaves[child] = identity
        ancestor: Block | None = node
        while ancestor is not None:
            if self._leaves.pop(ancestor, None) is None and ancestor.resident:
                break  # it was none, so nothing above it is
            ancestor = ancestor.parent
        for tokens, other in list(node.children.items()):
            # A partly filled block that the new one begins with says nothing more.
            if len(tokens) < len(window) and window[: len(tokens)] == tokens and not self.pinned(other):
                self.remove(identity, other)
        return child

    def _tidy(self, identity: KVIdentity, block: Block) -> None:
        """From here upwards: what leads to no resident block goes, and the first resident one may be a leaf now.

        What an insert is just walking over (`_path`) stays.
        """
        while block.parent is not None and not block.resident:
            if not block.children and block not in self._path:
                del block.parent.children[block.tokens]
            block = block.parent
        if block.parent is not None and not _resident_below(block):
            self._leaves[block] = identity

    def pinned(self, block: Block) -> bool:
        """Whether a lease on the block has not ended."""
        if not block.pins:
            return False
        now = self._now()
        block.pins = [until for until in block.pins if now < until]
        return bool(block.pins)

    def _make_room(self, nbytes: int, data: Sequence[Tensor], tokens_to_come: int) -> bool:
        """Whether `nbytes` fit now. What comes after them in the same chain is made room for at once."""
        if self.used_bytes + nbytes > self.capacity_bytes:
            per_token = nbytes // data[0].shape[1]
            wanted = max(nbytes, min(per_token * tokens_to_come, self.capacity_bytes))
            self._evict_until(lambda: self.used_bytes + wanted <= self.capacity_bytes)
        return self.used_bytes + nbytes <= self.capacity_bytes

    def _evict_until(self, enough: Callable[[], bool]) -> None:
        """Evict the least valuable leaves; blocks that were used in this very operation and pinned ones stay."""
        gone: list[tuple[KVIdentity, Block, list[Tensor]]] = []
        while not enough():
            leaves = [b for b in self._leaves if b.last_used < self._clock and not self.pinned(b)]
            if not leaves:
                break
            values = self.policy.values(self._now(), facts_of(leaves))
            order = sorted(range(len(leaves)), key=lambda i: (values[i], leaves[i].last_used))
            for i in order:
                leaf = leaves[i]
                identity = self._leaves[leaf]
                gone.append((identity, leaf, leaf.data))
                self.remove(identity, leaf)
                if enough():
                    break
        self.evictions += len(gone)
        if gone and self._evicted is not None:
            # They are out of the tree by now; whoever takes them needs their rows once more.
            for _, block, data in gone:
                block.data = data
            self._evicted([(identity, block) for identity, block, _ in gone])
            for _, block, _ in gone:
                block.data = []


def facts_of(blocks: Sequence[Block]) -> BlockFacts:
    """What a policy wants to know of blocks."""
    return BlockFacts(
        np.array([block.kind for block in blocks], dtype=np.int64),
        np.array([block.used_at for block in blocks], dtype=np.float64),
        np.array([block.reach for block in blocks], dtype=np.int64),
        np.array([block.depth for block in blocks], dtype=np.int64),
        np.array([block.expected for block in blocks], dtype=np.float64),
    )


def _resident_below(block: Block) -> bool:
    stack = list(block.children.values())
    while stack:
        child = stack.pop()
        if child.resident:
            return True
        stack.extend(child.children.values())
    return False


def _size(data: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in data)


def _walk(root: Block) -> Iterator[Block]:
    stack = [root]
    while stack:
        block = stack.pop()
        yield block
        stack.extend(block.children.values())
