"""Row `start`: seconds from starting `headrace train` to the first sampled token, with warm caches.

The clock starts before the process does. A run notes in `tokens_generated` how many tokens it has sampled, after every
Decode unit; with `line.decode_steps = 1` that is after each step of the engine. The run is killed once it says so.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import peers, report, runs

ROWS = ("start",)
TARGET_S = 6.0
TURNS = 3
POLL_S = 0.002
TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """The median of TURNS starts after one that warms the caches.

    Raises:
        PeerError: a run ended, or sampled nothing in time.
    """
    del rows  # there is one
    seconds = []
    for turn in range(TURNS + 1):
        seconds.append(time_to_first_token(runs.ADDITION))
        print(f"start {turn}: {seconds[-1]:.2f} s", flush=True)
    return {
        "start": report.within(
            "from headrace train to the first sampled token, warm caches",
            "s",
            headrace=report.summary(seconds[1:])["median"],
            target=TARGET_S,
            details={"seconds": report.summary(seconds[1:]), "warm_up_s": seconds[0]},
        )
    }


def time_to_first_token(
    config: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> float:
    """Seconds until a fresh run of `config`, with these variables set, has sampled its first tokens."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch) / "run"
        command = [runs.program(), "train", str(config), "--run-dir", str(folder)]
        for override in ("eval.tasks=0", "line.decode_steps=1", *overrides):
            command += ["--set", override]
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=os.environ | runs.threads() | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            while not sampled(folder / "tokens_generated"):
                if process.poll() is not None:
                    raise peers.PeerError(f"start: the run ended with exit code {process.returncode}")
                if time.perf_counter() - started > TIMEOUT_S:
                    raise peers.PeerError(f"start: no token was sampled within {TIMEOUT_S:.0f} s")
                time.sleep(POLL_S)
            return time.perf_counter() - started
        finally:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def sampled(file: Path) -> int:
    """How many tokens a run has noted; 0 before the first note."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return 0
    return int(text) if text else 0
