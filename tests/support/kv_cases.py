"""KV of made-up weights, whose every row depends on the identity and on all tokens up to it, as true KV does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.copying import BlockLayout
from headrace.state.directory import Directory
from headrace.state.eviction import EvictionPolicy, LeastRecentlyUsed
from headrace.state.kv import KVIdentity
from headrace.state.tiers.disk import DiskTier
from headrace.state.tiers.shared import SharedTier
from headrace.state.tiers.table import entry_type

LAYOUT = BlockLayout(((2, 3), (1, 5)), torch.float64)
"""Two buffers of unlike width."""
BLOCK = 4
BLOCK_BYTES = BLOCK * LAYOUT.row_bytes
ROOM = 64
"""Rows of a slot."""
A = KVIdentity("weights-a", "float64", "", "slot-rows")
B = A._replace(weights_id="weights-b")


class Clock:
    """Seconds that pass when a test says so; times of files must look like dates."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def rows_of(tokens: Sequence[int], identity: KVIdentity = A) -> list[Tensor]:
    """One tensor [planes, tokens, D] per buffer."""
    seed = int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=4).digest(), "little")
    chain, value = [], float(seed % 1000)
    for token in tokens:
        value = (value * 7.0 + token + 1.0) % 1_000_003.0
        chain.append(value)
    rows = []
    for planes, width in LAYOUT.buffers:
        generator = torch.Generator().manual_seed(seed + planes)
        base = torch.rand(planes, 1, width, generator=generator, dtype=torch.float64)
        rows.append(base + torch.tensor(chain, dtype=torch.float64)[None, :, None])
    return rows


def slot(rows: int = ROOM) -> list[Tensor]:
    return [torch.full((planes, rows, width), -1.0, dtype=torch.float64) for planes, width in LAYOUT.buffers]


def insert(directory: Directory, tokens: Sequence[int], **settings: Any) -> None:
    rows = rows_of(tokens, directory.identity)
    directory.insert(tokens, lambda start, stop: [part[:, start:stop].clone() for part in rows], **settings)


def restored(directory: Directory, tokens: Sequence[int], limit: int | None = None) -> int:
    """How much was restored, after checking that it is exactly what was stored."""
    views = slot(max(len(tokens), ROOM))
    length = directory.restore(tokens, views, limit).length
    for view, rows in zip(views, rows_of(tokens, directory.identity), strict=True):
        assert torch.equal(view[:, :length], rows[:, :length]), "wrong KV"
    return length


def make_directory(
    *,
    device_blocks: int = 100,
    host: SharedTier | None = None,
    disk: DiskTier | None = None,
    clock: Clock | None = None,
    policy: EvictionPolicy | None = None,
    identity: KVIdentity = A,
    **settings: Any,
) -> Directory:
    directory = Directory(
        device_blocks * BLOCK_BYTES,
        LAYOUT,
        block_size=BLOCK,
        host=host,
        disk=disk,
        policy=policy,
        clock=clock or Clock(),
        **settings,
    )
    directory.identity = identity
    return directory


def make_host(folder: Path, places: int = 8, name: str = "test", **settings: Any) -> SharedTier:
    settings = {"policy": LeastRecentlyUsed(), "clock": Clock()} | settings
    entry = entry_type(BLOCK).itemsize + 8
    return SharedTier(name, 8192 + places * (4096 + entry), BLOCK_BYTES, BLOCK, folder=folder, **settings)


def make_disk(folder: Path, files: int = 1000, **settings: Any) -> DiskTier:
    settings = {"policy": LeastRecentlyUsed(), "clock": Clock()} | settings
    return DiskTier(folder, files * (4096 + BLOCK_BYTES), **settings)
