"""Rows of `headrace runs show` on long runs: seconds and peak memory of the whole process.

The runs are written, not trained (`peer_scripts/headrace_history.py`): 64 trajectories of 23 tokens a step, so that
10,000 steps have 15 million tokens. The file is in the system's cache. What a run of one step takes is the start of
Python and its imports: it is taken off, and stands in the details.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import peers, report, runs

ROWS = ("history", "history_long", "history_memory")
STEPS = {"history": 1_000, "history_long": 10_000}
TARGET_S = {"history": 1.0, "history_long": 10.0}
TARGET_MB = 300.0
TURNS = 3
WRITE_TIMEOUT_S = 1800.0
READ_TIMEOUT_S = 300.0

MEASURE = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
seconds = time.perf_counter() - began
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""
"""Run by a small process of its own: a child's peak is never counted below that of its parent."""


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """The median of TURNS readings of each run, after one that warms the caches.

    Raises:
        PeerError: a run could not be written or read.
    """
    found: dict[str, report.Row] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        imports = _read(_write(Path(scratch) / "short", 1))
        for name, steps in STEPS.items():
            if name in rows or (name == "history_long" and "history_memory" in rows):
                run = _write(Path(scratch) / name, steps)
                size = (run / "journal.sqlite").stat().st_size
                found |= rows_of(name, _read(run), imports, size)
    return {name: row for name, row in found.items() if name in rows}


def rows_of(
    name: str, read: Sequence[tuple[float, float]], imports: Sequence[tuple[float, float]], size: int
) -> dict[str, report.Row]:
    """The rows of one run: (seconds, MB) of its readings, and of those of a run of one step.

    Args:
        size: bytes of its journal.
    """
    seconds, megabytes = (report.summary([turn[part] for turn in read]) for part in (0, 1))
    start = report.summary([turn[0] for turn in imports])
    details = {"seconds": seconds, "peak_mb": megabytes, "imports_s": start, "journal_mb": size / 2**20}
    what = f"headrace runs show, {STEPS[name]:,} steps"
    rows = {
        name: report.within(
            f"{what}, after imports",
            "s",
            headrace=seconds["median"] - start["median"],
            target=TARGET_S[name],
            details=details,
        )
    }
    if name == "history_long":
        rows["history_memory"] = report.within(
            f"{what}: peak memory",
            "MB",
            headrace=megabytes["median"],
            target=TARGET_MB,
            details=details,
        )
    return rows


def _write(folder: Path, steps: int) -> Path:
    command = [sys.executable, str(peers.SCRIPTS / "headrace_history.py"), str(folder), str(steps)]
    peers.run(command, what=f"a run of {steps} steps", timeout_s=WRITE_TIMEOUT_S)
    return folder


def _read(run: Path) -> list[tuple[float, float]]:
    """Seconds and peak MB of each reading."""
    command = [sys.executable, "-c", MEASURE, runs.program(), "runs", "show", str(run)]
    turns: list[tuple[float, float]] = []
    for turn in range(TURNS + 1):
        try:
            done = subprocess.run(command, capture_output=True, timeout=READ_TIMEOUT_S, check=True, text=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise peers.PeerError(f"headrace runs show of {run.name}: {error}") from error
        seconds, megabytes = json.loads(done.stdout)
        print(f"{run.name} {turn}: {seconds:.2f} s, {megabytes:.0f} MB", flush=True)
        turns.append((seconds, megabytes))
    return turns[1:]
