"""The file format of the disk tier: a run of consecutive blocks of one chain.

A header (identity, parent key, tokens, a fingerprint per block, a checksum of all that), then the blocks, flat, one
after the other. A block's key is computed from what the header says, and its fingerprint covers the key: a file
under a wrong name, or with parts of another, gives nothing.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.state.tiers.base import DIGEST, BlockKey, FlatBlock, keys_after

MAX_BLOCKS = 64
"""Blocks of one file."""

_MAGIC = b"HRKVEXT1"
_FIXED = struct.Struct(
    "<8sIIIIQ16s16s"
)  # magic, header bytes, blocks, tokens of a block, first index, block bytes, …
_ALIGNMENT = 4096
_MOST_HEADER_BYTES = 1 << 20


class ExtentError(Exception):
    """The file is not a whole, undamaged extent."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A file's blocks, in order."""

    keys: list[BlockKey]
    fingerprints: list[bytes]
    block_bytes: int
    data_at: int

    @property
    def size(self) -> int:
        return self.data_at + self.block_bytes * len(self.keys)


def pack_header(blocks: Sequence[FlatBlock]) -> bytes:
    """The header of a file that holds these consecutive blocks; the data follow it directly."""
    first = blocks[0].key
    block_tokens, block_bytes = len(first.tokens) // 4, blocks[0].flat.size
    used = _FIXED.size + len(blocks) * (4 * block_tokens + DIGEST) + DIGEST
    size = -(-used // _ALIGNMENT) * _ALIGNMENT
    body = b"".join(
        (
            _FIXED.pack(
                *(_MAGIC, size, len(blocks), block_tokens, first.index, block_bytes),
                *(first.identity, first.parent),
            ),
            *(block.key.tokens for block in blocks),
            *(block.fingerprint for block in blocks),
        )
    )
    return (body + _checksum(body)).ljust(size, b"\0")


def read_header(file: int, identity: bytes) -> Extent:
    """Read and check the header of an open file.

    Raises:
        ExtentError: it is damaged, cut short, or of another identity.
        OSError: it cannot be read.
    """
    fixed = os.pread(file, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        raise ExtentError("cut short")
    magic, size, count, block_tokens, index, block_bytes, whose, parent = _FIXED.unpack(fixed)
    used = _FIXED.size + count * (4 * block_tokens + DIGEST)
    if magic != _MAGIC or not 0 < count <= MAX_BLOCKS or not used + DIGEST <= size <= _MOST_HEADER_BYTES:
        raise ExtentError("not a file of KV blocks")
    body = os.pread(file, used + DIGEST, 0)
    if len(body) < used + DIGEST or _checksum(body[:used]) != body[used:]:
        raise ExtentError("its header is damaged")
    if os.fstat(file).st_size != size + count * block_bytes:
        raise ExtentError("cut short")
    if whose != identity:
        raise ExtentError("of other weights")
    tokens_end = _FIXED.size + count * 4 * block_tokens
    tokens = np.frombuffer(body[_FIXED.size : tokens_end], dtype="<i4")
    prints = [body[at : at + DIGEST] for at in range(tokens_end, used, DIGEST)]
    keys = keys_after(identity, parent, index, tokens.tolist(), block_tokens)
    return Extent(keys, prints, block_bytes, size)


def runs(blocks: Sequence[FlatBlock]) -> list[list[FlatBlock]]:
    """Cut blocks into runs of consecutive ones of a chain, of one size, each fit for a file; every block is in one."""
    left = {block.key.key: block for block in blocks}
    children: dict[bytes, list[bytes]] = {}
    for key, block in left.items():
        children.setdefault(block.key.parent, []).append(key)
    found = []
    starts = [key for key, block in left.items() if block.key.parent not in left]
    while left:
        # Without a beginning, what is left goes round in a circle, as only damaged names do.
        key = starts.pop() if starts else next(iter(left))
        if key not in left:
            continue
        run: list[FlatBlock] = []
        following: bytes | None = key
        while following is not None:
            run.append(left.pop(following))
            candidates = [c for c in children.get(following, []) if c in left]
            alike = [c for c in candidates if left[c].flat.size == run[0].flat.size]
            following = alike[0] if alike and len(run) < MAX_BLOCKS else None
            starts.extend(c for c in candidates if c != following)
        found.append(run)
    return found


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST).digest()
