"""The stores of KV blocks that are measured hold what was written, and one that does not is an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers, runs, store

BLOCKS, CHAIN = 20, 8


@pytest.fixture
def files(tmp_path: Path) -> Iterator[peers.Worker]:
    """The disk tier's side, with room for all blocks."""
    settings = {
        "store": "files",
        "folder": str(tmp_path / "store"),
        "capacity_bytes": 2 * BLOCKS * store.BLOCK_BYTES,
        "blocks": BLOCKS,
        "chain": CHAIN,
    }
    command = [sys.executable, str(peers.SCRIPTS / "kv_stores.py")]
    with peers.Worker("files", command, settings, start_timeout_s=120, environment=runs.threads()) as worker:
        yield worker


def test_what_is_written_is_read(files: peers.Worker) -> None:
    assert files.ready["block_bytes"] == store.BLOCK_BYTES
    filled = store._ask(files, "fill")
    assert (filled["held"], len(filled["seconds"])) == (BLOCKS, 3)
    assert BLOCKS * store.BLOCK_BYTES < filled["bytes"] <= filled["most_bytes"]
    store._check(files, filled, 2 * BLOCKS * store.BLOCK_BYTES, BLOCKS)
    chain, single = (store._ask(files, "read", order=order) for order in ("chain", "random"))
    assert (len(chain["seconds"]), chain["missing"]) == (2, 0), "the short chain is not timed"
    assert (len(single["seconds"]), single["missing"]) == (BLOCKS, 0)


def test_damage_is_an_error(files: peers.Worker, tmp_path: Path) -> None:
    filled = store._ask(files, "fill")
    (longest, *_) = sorted((tmp_path / "store").glob("*/*.kv"), key=lambda path: -path.stat().st_size)
    with longest.open("r+b") as stream:
        stream.seek(-3 * store.BLOCK_BYTES, 2)
        stream.write(b"damage")
    with pytest.raises(peers.PeerError, match=r"of 20 blocks 17 were read and 0 were wrong"):
        store._check(files, filled, 2 * BLOCKS * store.BLOCK_BYTES, BLOCKS)


@pytest.mark.parametrize(
    ("filled", "found", "message"),
    [
        ({}, {"wrong": 1}, "1 were wrong"),
        ({"held": 19}, {"found": 19}, "holds 19 of 20"),
        ({"most_bytes": 101}, {}, "took 101 bytes where 100"),
    ],
)
def test_a_store_that_fails_is_an_error(
    filled: dict[str, Any], found: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        name = "fake"

    monkeypatch.setattr(store, "_ask", lambda *_: {"found": 20, "wrong": 0} | found)
    whole = {"held": 20, "most_bytes": 100, "counters": {}} | filled
    with pytest.raises(peers.PeerError, match=message):
        store._check(Fake(), whole, 100, 20)  # type: ignore[arg-type]


def test_the_better_lmdb_is_the_peer() -> None:
    seconds = {"files": [2.0, 2.0, 9.0], "lmdb": [4.0, 4.0, 4.0], "lmdb_writemap": [3.0, 3.0, 1.0]}
    row = store._row("store_chain", seconds, {"chain": 128})
    assert (row.headrace, row.peer, row.ratio, row.met) == (2.0, 3.0, 1.5, True)
    assert (row.what, row.peer_name) == ("a 2048-token prefix from disk, warm page cache", "lmdb, writemap")
    assert row.details["seconds"]["files"]["p50"] == 2.0


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(peers.PeerError, match="give fewer --blocks"):
        store.measure(blocks=10**9)
