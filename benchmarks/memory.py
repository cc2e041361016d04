"""Row `memory_flat`: how far resident memory strays from its mean over a run of 200 small steps.

The model is `tiny-random`, so that what each step leaves behind shows against little else. Checkpoints are written on
the way, as in any run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, runs

ROWS = ("memory_flat",)
TARGET = 0.03
STEPS = 200
WARM_UP = 50
"""Steps in which buffers are made and lengths are met for the first time."""


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """One run.

    Raises:
        PeerError: it did not finish.
    """
    del rows  # there is one
    return {"memory_flat": row(small_run(STEPS))}


def small_run(steps: int) -> list[float]:
    """Resident memory in MB after each step of a run in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        config = runs.small_config(Path(scratch))
        metrics = runs.train(config, Path(scratch) / "run", steps=steps, what="memory_flat")
    return [float(step["memory_mb"]) for step in metrics]


def row(memory_mb: Sequence[float]) -> report.Row:
    """The largest distance from the mean after the warm-up."""
    return report.within(
        f"resident memory strays from its mean, {len(memory_mb)} steps of a small run",
        "share",
        headrace=strays(memory_mb[WARM_UP:]),
        target=TARGET,
        details={"memory_mb": list(memory_mb), "warm_up_steps": WARM_UP} | _halves(memory_mb),
    )


def strays(values: Sequence[float]) -> float:
    """The largest distance from the mean, as a share of it."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean


def _halves(memory_mb: Sequence[float]) -> dict[str, Any]:
    half = len(memory_mb) // 2
    return {"second_half_strays": strays(memory_mb[half:])}
