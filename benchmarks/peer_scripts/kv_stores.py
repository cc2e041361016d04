"""One store of KV blocks on disk, filled and read: the disk tier's files, or LMDB.

Blocks have SmolLM2-135M's shape and stand in chains; each one's bytes follow from its number. Settings: `store`
("files", "lmdb", "lmdb_writemap"), `folder`, `capacity_bytes`, `blocks`, `chain` (blocks of a chain). Requests, by
`do`:

    fill      writes all chains, one after the other. -> seconds of each, blocks held, bytes on disk, the most of them
              after any chain, counters
    check     reads all chains and compares each block with what was written. -> blocks found, blocks wrong
    read      order: "chain" (all blocks of a chain in one load) or "random" (one block in each); chains and blocks in
              random order. -> seconds of each load of the full length, blocks that were not found
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.copying import BlockLayout
from headrace.line.setup import default_threads
from headrace.state.eviction import Kind, LeastRecentlyUsed
from headrace.state.kv import PrefixCache
from headrace.state.lookup import Hit, Lookup
from headrace.state.machine import tune_allocator
from headrace.state.tiers.base import BlockKey, NewBlock, block_keys
from headrace.state.tiers.disk import DiskTier

BLOCK = 16
LAYOUT = BlockLayout(((30 * 3 * 2, 64),), torch.float32)
"""SmolLM2-135M: 30 layers of 3 KV heads, keys and values."""
BLOCK_BYTES = BLOCK * LAYOUT.row_bytes
IDENTITY = bytes(range(16))
DEADLINE_S = 60.0
"""No deadline passes: what is measured is how long it takes."""


class Store:
    """The store, and what can be asked of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.folder = Path(settings["folder"])
        capacity, policy = settings["capacity_bytes"], LeastRecentlyUsed()
        self.tier: Any
        if settings["store"] == "files":
            self.tier = DiskTier(self.folder, capacity, policy=policy, deadline_s=DEADLINE_S)
        else:
            from lmdb_tier import LmdbTier

            self.tier = LmdbTier(
                self.folder,
                capacity,
                policy,
                batch_bytes=settings["chain"] * (BLOCK_BYTES + 4096),
                writemap=settings["store"] == "lmdb_writemap",
            )
        self.lookup = Lookup(PrefixCache(0, BLOCK), [self.tier], LAYOUT, policy, time.time)
        self.chains = chains(settings["blocks"], settings["chain"])
        self.length = settings["chain"]
        generator = torch.Generator().manual_seed(0)
        ((planes, width),) = LAYOUT.buffers
        self.base = torch.rand(planes, BLOCK, width, generator=generator)
        self.slot = torch.empty(planes, settings["chain"] * BLOCK, width)
        self.rng = random.Random(1)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handler = getattr(self, request.pop("do"))
        result: dict[str, Any] = handler(**request)
        return result

    def fill(self) -> dict[str, Any]:
        seconds, most = [], 0
        for number, keys in enumerate(self.chains):
            reach = len(keys) * BLOCK
            new = [NewBlock(key, [self.rows(number, i)], Kind.SHARED, reach) for i, key in enumerate(keys)]
            started = time.perf_counter()
            self.tier.write(new)
            assert self.tier.flush()
            seconds.append(time.perf_counter() - started)
            most = max(most, on_disk(self.folder))
        os.sync()
        self.tier.refresh(IDENTITY)
        return {
            "seconds": seconds,
            "held": sum(self.tier.holds(key) for keys in self.chains for key in keys),
            "bytes": on_disk(self.folder),
            "most_bytes": most,
            "counters": asdict(self.tier.counters),
        }

    def check(self) -> dict[str, Any]:
        found = wrong = 0
        for number, keys in enumerate(self.chains):
            # What was evicted may be anywhere in a chain.
            for i, key in enumerate(keys):
                self.slot[:, :BLOCK] = -1.0
                if self.load([key]):
                    found += 1
                    wrong += not torch.equal(self.slot[:, :BLOCK], self.rows(number, i))
        return {"found": found, "wrong": wrong}

    def read(self, order: str) -> dict[str, Any]:
        wanted = self.chains if order == "chain" else [[key] for keys in self.chains for key in keys]
        wanted = self.rng.sample(wanted, len(wanted))
        full = self.length if order == "chain" else 1
        seconds, missing = [], 0
        for keys in wanted:
            started = time.perf_counter()
            found = self.load(keys)
            taken = time.perf_counter() - started
            missing += len(keys) - found
            if len(keys) == full:
                seconds.append(taken)
        return {"seconds": seconds, "missing": missing}

    def load(self, keys: Sequence[BlockKey]) -> int:
        """Copy the leading blocks that the store holds into the slot; how many were there and intact."""
        self.tier.refresh(IDENTITY)
        hits = []
        for i, key in enumerate(keys):
            if not self.tier.holds(key):
                break
            hits.append(Hit(i * BLOCK, BLOCK, None, self.tier, key))
        return self.lookup.load(hits, [self.slot])[0].length // BLOCK

    def rows(self, chain: int, index: int) -> Tensor:
        """The block's rows [planes, BLOCK, D]."""
        return self.base + (chain * self.length + index)


def chains(blocks: int, length: int) -> list[list[BlockKey]]:
    """Keys of so many blocks, in chains of `length`; the last one may be shorter."""
    rng = random.Random(0)
    found = []
    for start in range(0, blocks, length):
        count = min(length, blocks - start)
        tokens = [rng.randrange(49152) for _ in range(count * BLOCK)]
        found.append(block_keys(IDENTITY, tokens, BLOCK))
    return found


def on_disk(folder: Path) -> int:
    """Bytes that the folder's files take on the disk; a map that is not full has holes."""
    found = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(min(stat.st_size, stat.st_blocks * 512) for stat in found)


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(default_threads())
    tune_allocator()
    store = Store(settings)
    with torch.inference_mode():
        serving.serve({"threads": torch.get_num_threads(), "block_bytes": BLOCK_BYTES}, store.answer)


if __name__ == "__main__":
    main()
