"""Rows `crash_equal`, `crash_lost` and `crash_resume`: a run that is killed with SIGKILL again and again.

The run is a small one of `tiny-random`, so that it can die often: in units, checkpoints, publishes and journal
writes, wherever the random instants fall. Its journal is then replayed from the start.
"""

from __future__ import annotations

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
from headrace.state.journal import Journal

ROWS = ("crash_equal", "crash_lost", "crash_resume")
KILLS = 30
STEPS = 400
CHECKPOINT_EVERY = 7
DECODE_STEPS = 4
MOST_SEQUENCES = 64
LIMIT_S = 120.0

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
        kills = killed_run(config, run_dir)
        steps = replayed(run_dir)
        details = kills | _books(run_dir, kills["start_s"])
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
    """Start, and kill at random instants until `KILLS` are done; then let it finish."""
    rng = random.Random(0)
    program, kills = runs.program(), 0
    times: list[float] = []
    command = [program, "train", str(config), "--run-dir", str(run_dir)]
    while True:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        if kills == KILLS:
            _, errors = process.communicate(timeout=20 * LIMIT_S)
            if process.returncode:
                raise peers.PeerError(f"the killed run did not finish: {errors.decode()[-300:]}")
            return {"kills": kills, "start_s": times}
        before = _last_event(run_dir)
        while _last_event(run_dir) <= before:  # it works again
            if process.poll() is not None or time.monotonic() - started > LIMIT_S:
                raise peers.PeerError(f"the run did not come back after kill {kills}")
            time.sleep(0.02)
        times.append(time.monotonic() - started)
        time.sleep(rng.uniform(0.0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        command = [program, "train", "--resume", str(run_dir)]


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


def _last_event(run_dir: Path) -> int:
    path = run_dir / "journal.sqlite"
    if not path.exists():
        return 0
    journal = Journal.open(path, read_only=True)
    try:
        return journal.last_seq
    finally:
        journal.close()


def _books(run_dir: Path, start_s: Sequence[float]) -> dict[str, Any]:
    """What the journal says about each kill: tokens lost, and how long a resume took beside what it had to repeat.

    Args:
        start_s: seconds from a process's birth to its first event, of the first start and of each resume.
    """
    lost: list[int] = []
    ratios: list[float] = []
    repeated = 0.0
    started = 0
    journal = Journal.open(run_dir / "journal.sqlite", read_only=True)
    try:
        for event in journal.read():
            if event.kind == "lost":
                lost.append(event.body["tokens"])
            elif event.kind == "checkpoint":
                repeated = 0.0
            elif event.kind == "step":
                metrics = event.body["metrics"]
                repeated += metrics["time_gradient_s"] + metrics["time_optimizer_s"]
            elif event.kind == "start":
                if 0 < started < len(start_s):
                    ratios.append(start_s[started] / (start_s[0] + repeated))
                started += 1
    finally:
        journal.close()
    return {"lost": lost, "resume_ratios": ratios}
