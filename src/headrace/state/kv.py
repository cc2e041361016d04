"""The prefix cache: blocks of KV found by what they are, never by where they came from.

A block's identity is the `KVIdentity` of its root (which weights, in which format, with which adapter, in which
layout) and the chain of tokens before it. Blocks form a tree: a node holds up to `block_size` tokens and the KV
rows of exactly those tokens.

Invariants (`check_integrity`)
* A hit compares the tokens themselves, not only a hash of them.
* Blocks of different identities are never reachable from one another.
* `used_bytes` is the sum of the blocks' sizes and stays within `capacity_bytes`.
* Only the last block of a chain may be partly filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class KVIdentity(NamedTuple):
    """What KV belongs to. Two blocks may only be exchanged when all of this agrees."""

    weights_id: str
    weight_format: str
    adapter: str
    layout: str


@dataclass(eq=False, slots=True)
class _Block:
    tokens: tuple[int, ...]
    data: list[Tensor]
    parent: _Block | None
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)
    last_used: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.data)


class PrefixCache:
    """Cached prompt prefixes of one engine, least recently used evicted first.

    Args:
        capacity_bytes: the most memory the blocks may take; 0 caches nothing.
        block_size: tokens per block.
    """

    def __init__(self, capacity_bytes: int, block_size: int = 16) -> None:
        self.capacity_bytes = capacity_bytes
        self.block_size = block_size
        self.used_bytes = 0
        self.hit_tokens = 0
        self.queried_tokens = 0
        self._roots: dict[KVIdentity, _Block] = {}
        self._clock = 0

    def match(self, identity: KVIdentity, tokens: Sequence[int]) -> list[tuple[list[Tensor], int]]:
        """The longest cached prefix of `tokens` as (rows of one block, how many of them match), in order."""
        self._clock += 1
        found: list[tuple[list[Tensor], int]] = []
        for block, matched in self._find(identity, tokens):
            block.last_used = self._clock
            found.append((block.data, matched))
        self.queried_tokens += len(tokens)
        self.hit_tokens += sum(matched for _, matched in found)
        return found

    def matched_length(self, identity: KVIdentity, tokens: Sequence[int]) -> int:
        """How many leading tokens `match` would find; counts as no use."""
        return sum(matched for _, matched in self._find(identity, tokens))

    def insert(
        self, identity: KVIdentity, tokens: Sequence[int], read: Callable[[int, int], list[Tensor]]
    ) -> None:
        """Cache the KV of `tokens`; `read(start, stop)` copies rows out, one tensor [planes, tokens, D] per buffer."""
        if not self.capacity_bytes:
            return
        self._clock += 1
        node = self._roots.setdefault(identity, _Block((), [], None))
        for start in range(0, len(tokens), self.block_size):
            window = tuple(tokens[start : start + self.block_size])
            child = node.children.get(window)
            if child is None:
                child = _Block(window, read(start, start + len(window)), node)
                if not self._make_room(child.nbytes, keep=node):
                    return
                node.children[window] = child
                self.used_bytes += child.nbytes
            child.last_used = self._clock
            node = child

    def drop(self, identity: KVIdentity) -> None:
        """Forget every block of `identity`."""
        root = self._roots.pop(identity, None)
        if root is not None:
            self.used_bytes -= sum(block.nbytes for block in _walk(root))

    def clear(self) -> None:
        self._roots.clear()
        self.used_bytes = 0

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
        if total != self.used_bytes or total > self.capacity_bytes:
            raise RuntimeError(f"prefix cache: {self.used_bytes} bytes booked, {total} held")

    def _find(self, identity: KVIdentity, tokens: Sequence[int]) -> Iterator[tuple[_Block, int]]:
        node = self._roots.get(identity)
        position = 0
        while node is not None and position < len(tokens):
            node, matched = self._best_child(node, tuple(tokens[position : position + self.block_size]))
            if node is None:
                return
            yield node, matched
            position += matched
            if matched < self.block_size:
                return

    def _best_child(self, node: _Block, window: tuple[int, ...]) -> tuple[_Block | None, int]:
        exact = node.children.get(window)
        if exact is not None:
            return exact, len(window)
        best, length = None, 0
        for tokens, child in node.children.items():
            common = 0
            for ours, theirs in zip(window, tokens, strict=False):
                if ours != theirs:
                    break
                common += 1
            if common > length:
                best, length = child, common
        return best, length

    def _make_room(self, nbytes: int, keep: _Block) -> bool:
        """Evict least recently used leaves until `nbytes` fit; blocks used in this very operation stay."""
        while self.used_bytes + nbytes > self.capacity_bytes:
            leaves = [
                block
                for root in self._roots.values()
                for block in _walk(root)
                if block.parent is not None
                and not block.children
                and block is not keep
                and block.last_used < self._clock
            ]
            if not leaves:
                return False
            leaves.sort(key=lambda block: block.last_used)
            for leaf in leaves:
                assert leaf.parent is not None
                del leaf.parent.children[leaf.tokens]
                self.used_bytes -= leaf.nbytes
                if self.used_bytes + nbytes <= self.capacity_bytes:
                    break
        return True


def _walk(root: _Block) -> Iterator[_Block]:
    stack = [root]
    while stack:
        block = stack.pop()
        yield block
        stack.extend(block.children.values())
