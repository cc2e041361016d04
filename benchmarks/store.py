"""LMDB against the disk tier's own files: `python -m benchmarks.store [--blocks N]`. It is no part of the suite.

Rows `store_chain` (a prefix of 2,048 tokens, as in `kv_disk`) and `store_random` (one block), both with a warm page
cache and fingerprints checked; `store_write` (a prefix's blocks, fingerprints made, nothing synced) and `store_full`
(the same into a store that holds half of all blocks, so that as much is evicted as is written). LMDB is the better of
a plain and a writable map.

Invariants
* Both sides store the same blocks, are read through the same lookup into the same slot, and have the same capacity.
* Before anything is timed every block is read and compared with what was written: a wrong one is an error.
* A store that takes more of the disk than its capacity is an error, and so is a block that is missing although all fit.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
from rich.console import Console

from benchmarks import peers, report, runs, suite

ROWS = ("store_chain", "store_random", "store_write", "store_full")
STORES = ("files", "lmdb", "lmdb_writemap")
BLOCKS = 10_000
CHAIN = 128
"""Blocks of a prefix of 2,048 tokens."""
ROUNDS = 2
PASSES = 3
BLOCK_BYTES = 16 * 30 * 3 * 2 * 64 * 4
SLACK = 1.05
"""Of capacity over blocks where everything is to fit: headers, and what LMDB wants for itself."""
LIMIT_S = 3600.0

WHAT = {
    "store_chain": "a {tokens}-token prefix from disk, warm page cache",
    "store_random": "one block from disk, at random, warm page cache",
    "store_write": "writing the blocks of a {tokens}-token prefix",
    "store_full": "the same into a full store",
}


def measure(blocks: int = BLOCKS, chain: int = CHAIN, rounds: int = ROUNDS) -> dict[str, report.Row]:
    """All rows. The stores take turns, in the opposite order in every second round.

    Raises:
        PeerError: a store lost blocks, gave wrong ones or outgrew its capacity; LMDB cannot be installed; there is too
            little memory for a warm page cache, or too little room on the disk.
    """
    size = blocks * BLOCK_BYTES
    folder = Path(tempfile.gettempdir())
    if psutil.virtual_memory().available < 1.5 * size or shutil.disk_usage(folder).free < 1.5 * size:
        raise peers.PeerError(
            f"{blocks} blocks take {size / 2**30:.1f} GB of memory as page cache, and of {folder}: give fewer --blocks"
        )
    packages = _packages()
    seconds: dict[str, dict[str, list[float]]] = {row: {store: [] for store in STORES} for row in ROWS}
    facts: dict[str, Any] = {store: {} for store in STORES}
    room = 2 * chain * (BLOCK_BYTES + 4096)  # what LMDB keeps free
    whole, half = int(SLACK * size) + room, int(size / 2) + room
    for turn in range(rounds):
        for store in STORES if turn % 2 == 0 else STORES[::-1]:
            print(f"round {turn + 1}: {store}", flush=True)
            with _store(store, whole, blocks, chain, packages) as worker:
                filled = _ask(worker, "fill")
                _check(worker, filled, whole, blocks)
                seconds["store_write"][store] += filled["seconds"][: blocks // chain]
                for _ in range(PASSES):
                    for row, order in (("store_chain", "chain"), ("store_random", "random")):
                        answer = _ask(worker, "read", order=order)
                        if answer["missing"]:
                            raise peers.PeerError(f"{store}: {answer['missing']} blocks were not found")
                        seconds[row][store] += answer["seconds"]
            with _store(store, half, blocks, chain, packages) as worker:
                full = _ask(worker, "fill")
                _check(worker, full, half, None)
                # The first half meets room.
                seconds["store_full"][store] += full["seconds"][: blocks // chain][
                    -(-blocks // chain) // 2 + 3 :
                ]
            facts[store] = {
                name: {key: value for key, value in of.items() if key != "seconds"}
                for name, of in (("filled", filled), ("full", full))
            }
    details = {
        "blocks": blocks,
        "chain": chain,
        "rounds": rounds,
        "capacity_bytes": {"whole": whole, "half": half},
        "stores": facts,
        "versions": peers.versions(peers.ensure_venv("lmdb"), ["lmdb"]),
    }
    return {row: _row(row, of, details) for row, of in seconds.items()}


def _row(row: str, seconds: dict[str, list[float]], details: dict[str, Any]) -> report.Row:
    best = min(STORES[1:], key=lambda store: median(seconds[store]))
    spread = {
        store: dict(zip(("p10", "p50", "p90"), _deciles(of), strict=True)) for store, of in seconds.items()
    }
    return report.against(
        WHAT[row].format(tokens=16 * details["chain"]),
        "s",
        headrace=median(seconds["files"]),
        peer=median(seconds[best]),
        peer_name=best.replace("_", ", "),
        target=1.0,
        better="lower",
        details=details | {"seconds": spread, "loads": {store: len(of) for store, of in seconds.items()}},
    )


def _deciles(values: Sequence[float]) -> tuple[float, float, float]:
    tenths = quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[4], tenths[8]


def _packages() -> str:
    """The folder of LMDB's own environment that holds its packages."""
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    python = peers.ensure_venv("lmdb")
    found = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return found.stdout.strip()


@contextmanager
def _store(store: str, capacity: int, blocks: int, chain: int, packages: str) -> Iterator[peers.Worker]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        settings = {
            "store": store,
            "folder": folder,
            "capacity_bytes": capacity,
            "blocks": blocks,
            "chain": chain,
        }
        command = [sys.executable, str(peers.SCRIPTS / "kv_stores.py")]
        # LMDB's folder has nothing of what headrace needs.
        path = f"{peers.SOURCES}:{packages}"
        with peers.Worker(
            store,
            command,
            settings,
            start_timeout_s=LIMIT_S,
            environment=runs.threads() | {"PYTHONPATH": path},
        ) as worker:
            yield worker


def _ask(worker: peers.Worker, do: str, **request: Any) -> dict[str, Any]:
    return worker.ask({"do": do} | request, timeout_s=LIMIT_S)


def _check(worker: peers.Worker, filled: dict[str, Any], capacity: int, blocks: int | None) -> None:
    """What was filled is intact, within the capacity and, where all was to fit, complete."""
    found = _ask(worker, "check")
    if found["wrong"] or found["found"] != filled["held"]:
        raise peers.PeerError(
            f"{worker.name}: of {filled['held']} blocks {found['found']} were read and {found['wrong']} were wrong"
        )
    if blocks is not None and filled["held"] != blocks:
        raise peers.PeerError(
            f"{worker.name}: holds {filled['held']} of {blocks} blocks: {filled['counters']}"
        )
    if filled["most_bytes"] > capacity:
        raise peers.PeerError(
            f"{worker.name}: took {filled['most_bytes']} bytes where {capacity} are allowed"
        )


def main() -> int:
    """Measure, show the table and, for the full number of blocks, write the rows."""
    parser = argparse.ArgumentParser(prog="benchmarks.store", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"{BLOCKS} by default")
    parser.add_argument("--chain", type=int, default=CHAIN, help=f"blocks of a chain, {CHAIN} by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"{ROUNDS} by default")
    given = parser.parse_args()
    if given.chain < 1 or given.rounds < 1 or given.blocks < 10 * given.chain:
        parser.error("give at least ten chains of blocks, and one round")
    try:
        rows = measure(given.blocks, given.chain, given.rounds)
    except peers.PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = Console()
    if not console.is_terminal:
        console.width = suite.WIDTH
    console.print(suite.table(rows))
    if (given.blocks, given.chain) == (BLOCKS, CHAIN):
        for name, row in rows.items():
            print(f"written: {report.write(name, row).relative_to(suite.REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
