"""Row `algorithms`: does every algorithm learn `examples/addition.toml`?

Each built-in algorithm trains the example with its presets, seed by seed in turn.

Invariants
* What counts is the held-out reward at the end. The reward of the steps would not compare: an algorithm that replaces
  groups whose samples are all right does not count those.
* The row's value is the worst algorithm's, the mean over its seeds: no algorithm hides behind another.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import report, runs
from headrace.presets import PRESETS

ROWS = ("algorithms",)

STEPS = 15
SEEDS = (0, 1, 2)
HELD_OUT = 64
TARGET = 0.85

Ends = Mapping[str, Sequence[float]]
"""Per algorithm, the held-out reward of each seed's final model."""


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """Train and judge.

    Raises:
        PeerError: a run did not finish.
    """
    found = {}
    for name in rows:
        ends, curves = learn(tuple(PRESETS))
        found[name] = row(ends, {"curves": curves})
    return found


def learn(algorithms: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, list[list[float]]]]:
    """By algorithm and seed: the held-out reward at the end, and the mean reward of each step."""
    ends: dict[str, list[float]] = {name: [] for name in algorithms}
    curves: dict[str, list[list[float]]] = {name: [] for name in algorithms}
    for seed in SEEDS:
        for name in algorithms:
            what = f"{runs.ADDITION.stem}, {name}, seed {seed}"
            print(what, flush=True)
            overrides = (f"line.seed={seed}", f"algorithm.name={name}", f"eval.tasks={HELD_OUT}")
            # A folder per run: each leaves gigabytes of checkpoints.
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
                folder = Path(scratch) / "run"
                metrics = runs.train(runs.ADDITION, folder, steps=STEPS, overrides=overrides, what=what)
                after = json.loads((folder / "evaluation-after.json").read_text(encoding="utf-8"))
            ends[name].append(float(after["reward"]))
            curves[name].append([float(step["reward_mean"]) for step in metrics])
            print(f"  held-out reward {ends[name][-1]:.3f}", flush=True)
    return ends, curves


def row(ends: Ends, details: Mapping[str, Any] | None = None) -> report.Row:
    """The worst algorithm's held-out reward."""
    means = {name: fmean(of_seeds) for name, of_seeds in ends.items()}
    worst = min(means, key=lambda name: means[name])
    return report.within(
        f"held-out reward after {STEPS} steps, worst of {len(means)} algorithms ({worst}), "
        f"examples/{runs.ADDITION.name}, {len(SEEDS)} seeds",
        "reward",
        headrace=means[worst],
        target=TARGET,
        better="higher",
        details={"means": means, "ends": ends, "seeds": list(SEEDS), **(details or {})},
    )
