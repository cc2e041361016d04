"""Row `controller`: seconds per generated token that the controller takes.

A few steps of `examples/addition.toml`. What of a step is neither inside a unit of work nor spent waiting is the
controller's: planning, events, the journal and the state. The first step is the warm-up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, runs

ROWS = ("controller",)

TARGET_S = 1e-4
"""A tenth of what a token takes in generation at its fastest here, in float32."""

STEPS = 6
WARM_UP = 1


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """One short run.

    Raises:
        PeerError: it did not finish.
    """
    del rows  # there is one
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        metrics = runs.train(runs.ADDITION, Path(scratch) / "run", steps=STEPS, what="controller")
    return {"controller": row(metrics)}


def row(metrics: Sequence[Mapping[str, Any]]) -> report.Row:
    """All steps after the warm-up together."""
    counted = metrics[WARM_UP:]
    return report.within(
        "the controller's time per generated token, examples/addition.toml",
        "s",
        headrace=runs.total(counted, "time_other_s") / runs.total(counted, "tokens_generated"),
        target=TARGET_S,
        details={
            "controller_s": [step["time_other_s"] for step in counted],
            "step_s": [step["time_step_s"] for step in counted],
            "tokens": [step["tokens_generated"] for step in counted],
        },
    )
