"""Rows `guess_number`, `guess_number_time`: `examples/guess_number.toml`, a conversation, learned from 3 seeds."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import peers, report, runs

ROWS = ("guess_number", "guess_number_time")
GUESS = peers.BENCHMARKS.parent / "examples" / "guess_number.toml"
SEEDS = (0, 1, 2)
CLEAR = 0.1
LIMIT_S = 600.0


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """One whole run per seed, held-out tasks before and after included.

    Raises:
        PeerError: a run did not finish.
    """
    del rows
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        return guess_rows([_run(Path(scratch) / f"seed-{seed}", seed) for seed in SEEDS])


def guess_rows(measured: Sequence[Mapping[str, Any]]) -> dict[str, report.Row]:
    """The rows of some runs, each as `_run` returns it."""
    gains = [run["after"] - run["before"] for run in measured]
    details = {"runs": list(measured), "gain_sd": stdev(gains)}
    return {
        "guess_number": report.within(
            f"gain in held-out reward of guess_number, mean of {len(gains)} seeds",
            "reward",
            headrace=mean(gains),
            # Clearly: more than a tenth of a win, and two standard errors above nothing.
            target=max(CLEAR, 2 * stdev(gains) / len(gains) ** 0.5),
            better="higher",
            details=details,
        ),
        "guess_number_time": report.within(
            "the longest of these runs, start and evaluation included",
            "s",
            headrace=max(run["seconds"] for run in measured),
            target=LIMIT_S,
            details=details,
        ),
    }


def _run(folder: Path, seed: int) -> dict[str, Any]:
    command = [runs.program(), "train", str(GUESS), "--run-dir", str(folder), "--set", f"line.seed={seed}"]
    started = time.monotonic()
    peers.run(command, what=f"guess_number, seed {seed}", timeout_s=2 * LIMIT_S, environment=runs.threads())
    seconds = time.monotonic() - started
    before, after = (
        json.loads((folder / f"evaluation-{name}.json").read_text(encoding="utf-8"))
        for name in ("before", "after")
    )
    metrics = runs.read_lines(folder / "metrics.jsonl")
    return {
        "seed": seed,
        "seconds": seconds,
        "before": before["reward"],
        "after": after["reward"],
        "reward": [step["reward_mean"] for step in metrics],
        "training_s": runs.total(metrics, "time_step_s"),
    }
