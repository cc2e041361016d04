"""Rows `crash_equal`, `crash_lost` and `crash_resume`: a run that is killed with SIGKILL again and again.

The run is a small one of `tiny-random`, so that it can die often: in units, checkpoints, publishes and journal
writes, wherever the random instants fall. Its journal is then replayed from the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import peers, report, runs
from headrace.runs.events import CheckpointWritten, RunStarted, StepTaken, TokensLost, decode
from headrace.state.journal import Journal

ROWS = ("crash_equal", "crash_lost", "crash_resume")
KILLS = 30
STEPS = 200
STARTS = 5
"""Fresh starts that a resume is compared with."""
CHECKPOINT_EVERY = 7
DECODE_STEPS = 4
MOST_SEQUENCES = 64
LIMIT_S = 120.0
KINDS = tuple(event.kind for event in (TokensLost, CheckpointWritten, StepTaken, RunStarted))
"""What of the journal is read."""

MORE = f"""
[engine]
max_sequences = {MOST_SEQUENCES}

[line]
steps = {STEPS}
decode_steps = {DECODE_STEPS}
checkpoint_every = {CHECKPOINT_EVERY}
max_staleness = 2

[eval]
tasks = 0
"""


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """One run, killed `KILLS` times, then finished and replayed."""
    del rows
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        config, run_dir = runs.small_config(Path(scratch), MORE), Path(scratch) / "run"
        fresh = [_start(config, Path(scratch) / f"start-{number}") for number in range(STARTS)]
        kills = killed_run(config, run_dir)
        steps = replayed(run_dir)
        details = kills | {"fresh_s": fresh} | _books(run_dir, kills["start_s"], median(fresh))
    equal = sum(steps) / len(steps)
    return {
        "crash_equal": report.within(
            f"steps whose weights are the replay's, bit for bit, after {details['kills']} kills",
            "share",
            headrace=equal,
            target=1.0,
            better="higher",
            details=details | {"steps": len(steps)},
        ),
        "crash_lost": report.within(
            "most tokens that a kill took, in units of Decode work",
            "units",
            headrace=max(details["lost"], default=0) / (DECODE_STEPS * MOST_SEQUENCES),
            target=1.0,
            details=details,
        ),
        "crash_resume": report.within(
            "a resume, against a start and the gradients since the checkpoint",
            "ratio",
            headrace=median(details["resume_ratios"]),
            target=1.0,
            details=details,
        ),
    }


def killed_run(config: Path, run_dir: Path) -> dict[str, Any]:
    """Start, and kill at `KILLS` random instants; then let it finish."""
    rng = random.Random(0)
    resume = [runs.program(), "train", "--resume", str(run_dir)]
    times: list[float] = []
    for kill in range(KILLS):
        process, seconds = _until_it_works(_new(config, run_dir) if not kill else resume, run_dir)
        times.append(seconds)
        time.sleep(rng.uniform(0.0, 1.5))
        _kill(process)
    peers.run(resume, what="the killed run", timeout_s=20 * LIMIT_S)
    return {"kills": KILLS, "start_s": times}


def _start(config: Path, run_dir: Path) -> float:
    """Seconds from a fresh process's birth to its first record."""
    process, seconds = _until_it_works(_new(config, run_dir), run_dir)
    _kill(process)
    return seconds


def _new(config: Path, run_dir: Path) -> list[str]:
    return [runs.program(), "train", str(config), "--run-dir", str(run_dir)]


def _until_it_works(command: Sequence[str], run_dir: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Start a process; returns it once the run has a new record, and how long that took."""
    before, started = _last_record(run_dir), time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while _last_record(run_dir) <= before:
        if process.poll() is not None or time.monotonic() - started > LIMIT_S:
            _kill(process)
            raise peers.PeerError(f"{run_dir.name} did not start or come back")
        time.sleep(0.02)
    return process, time.monotonic() - started


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def replayed(run_dir: Path) -> list[bool]:
    """Per step of the run, whether a replay in a process of its own gives the same weights."""
    code = (
        "import json, sys\nfrom headrace.line.replay import replay\n"
        "print(json.dumps([step.equal for step in replay(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", code, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * LIMIT_S, check=False)
    if done.returncode:
        raise peers.PeerError(f"the replay failed: {done.stderr[-300:]}")
    equal: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return equal


def _last_record(run_dir: Path) -> int:
    path = run_dir / "journal.sqlite"
    if not path.exists():
        return 0
    journal = Journal.open(path, read_only=True)
    try:
        return journal.last_seq
    finally:
        journal.close()


def _books(run_dir: Path, start_s: Sequence[float], fresh_s: float) -> dict[str, Any]:
    """What the journal says about each kill: tokens lost, and how long a resume took beside what it had to repeat.

    Args:
        start_s: seconds from a process's birth to its first record, of the first start and of each resume.
        fresh_s: those of a start without anything to resume.
    """
    lost: list[int] = []
    ratios: list[float] = []
    repeated = 0.0
    started = 0
    journal = Journal.open(run_dir / "journal.sqlite", read_only=True)
    try:
        for stored in journal.read(kinds=KINDS):
            for event in decode(stored.body, kinds=KINDS):
                match event:
                    case TokensLost(tokens):
                        lost.append(tokens)
                    case CheckpointWritten():
                        repeated = 0.0
                    case StepTaken(metrics=metrics):
                        repeated += metrics["time_gradient_s"] + metrics["time_optimizer_s"]
                    case RunStarted():
                        if 0 < started < len(start_s):
                            ratios.append(start_s[started] / (fresh_s + repeated))
                        started += 1
    finally:
        journal.close()
    return {"lost": lost, "resume_ratios": ratios}
