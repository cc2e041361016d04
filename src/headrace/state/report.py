"""What KV lies where, as seen from outside: without an engine, and without changing anything."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.state.eviction import Kind
from headrace.state.tiers.base import DISK, HOST
from headrace.state.tiers.segment import HEADER_BYTES, Segment, segment_path
from headrace.state.tiers.shelf import SUFFIX, facts_of_name, folders
from headrace.state.tiers.table import entry_type, kind_of


def kv_report(shared_name: str | None, disk_folder: Path) -> list[dict[str, Any]]:
    """One entry per tier and identity whose KV is there.

    Args:
        shared_name: of the host tier, see `SharedTier`; None looks at the disk only.

    Returns:
        Dicts with `tier`, `place` (a path), `identity` (hex digest), `blocks`, `bytes`, `kinds` (blocks per kind), and
        `last_used` (seconds since the epoch). The host tier comes first. What cannot be read is left out.
    """
    return (_host(shared_name) if shared_name is not None else []) + _disk(disk_folder)


def _host(name: str) -> list[dict[str, Any]]:
    segment = Segment.look(segment_path(name))
    if segment is None:
        return []
    shape = segment.shape
    try:
        kind = entry_type(shape.block_tokens)
        entries = np.frombuffer(segment.map, dtype=kind, count=shape.places, offset=HEADER_BYTES).copy()
    finally:
        segment.close()
    entries = entries[(entries["generation"] != 0) & (entries["generation"] % np.uint64(2) == 0)]
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        identity = entry["name"].tobytes()[:16].hex()
        item = found.setdefault(identity, _empty(HOST, segment.path, identity))
        _count(item, 1, int(entry["nbytes"]), kind_of(int(entry["kind"])))
        item["last_used"] = max(item["last_used"], float(entry["last_used"]))
    return [found[identity] for identity in sorted(found)]


def _disk(folder: Path) -> list[dict[str, Any]]:
    report = []
    for place in folders(folder):
        item = _empty(DISK, place, place.name)
        with contextlib.suppress(OSError), os.scandir(place) as listing:
            for entry in listing:
                if not entry.name.endswith(SUFFIX):
                    continue
                with contextlib.suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    blocks, kind, _, _ = facts_of_name(Path(entry.path))
                    _count(item, blocks, stat.st_size, kind)
                    item["last_used"] = max(item["last_used"], stat.st_mtime)
        if item["blocks"]:
            report.append(item)
    return report


def _empty(tier: str, place: Path, identity: str) -> dict[str, Any]:
    kinds = {kind.name.lower(): 0 for kind in Kind}
    return {
        **{"tier": tier, "place": str(place), "identity": identity},
        **{"blocks": 0, "bytes": 0, "kinds": kinds, "last_used": 0.0},
    }


def _count(item: dict[str, Any], blocks: int, nbytes: int, kind: Kind) -> None:
    item["blocks"] += blocks
    item["bytes"] += nbytes
    item["kinds"][kind.name.lower()] += blocks


def age(item: dict[str, Any], now: float | None = None) -> float:
    """Seconds since an entry of the report was used last."""
    return max(0.0, (time.time() if now is None else now) - item["last_used"])
