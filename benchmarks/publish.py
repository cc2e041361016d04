"""Rows `publish`, `publish_int8`: the share of a step during which decoding stops because weights are published.

A few steps of `examples/addition.toml`, once per weight format. Each step logs what its publish took, packing the
generator's format included; the first step is the warm-up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report, runs

ROWS = ("publish", "publish_int8")
TARGETS = {"publish": 0.03, "publish_int8": 0.05}
OVERRIDES = {"publish": (), "publish_int8": runs.INT8}

STEPS = 6
WARM_UP = 1


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """One short run per row.

    Raises:
        PeerError: a run did not finish.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for name in rows:
            metrics = runs.train(
                runs.ADDITION, Path(scratch) / name, steps=STEPS, overrides=OVERRIDES[name], what=name
            )
            found[name] = row(name, metrics)
    return found


def row(name: str, metrics: Sequence[Mapping[str, Any]]) -> report.Row:
    """The median over the steps after the warm-up."""
    counted = metrics[WARM_UP:]
    shares = [step["time_publish_s"] / step["time_step_s"] for step in counted]
    weights = "int8" if name == "publish_int8" else "float32"
    return report.within(
        f"share of a step that a publish takes, {weights}",
        "share",
        headrace=median(shares),
        target=TARGETS[name],
        details={
            "shares": shares,
            "publish_s": [step["time_publish_s"] for step in counted],
            "step_s": [step["time_step_s"] for step in counted],
            "overrides": list(OVERRIDES[name]),
        },
    )
