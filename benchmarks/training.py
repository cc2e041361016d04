"""Rows `training`, `training_long`, `training_gemm`: the gradient of real GRPO groups, against transformers.

headrace samples one step's groups of `examples/addition.toml` with its own engine, once as the example says and once
with answers of 64 tokens. Then both sides take the gradient of the same trajectories under the same weights, in turn:
headrace packs each group around its prompt, transformers pads all samples to the longest.

Invariants
* Both sides' gradients are the same: their norms are compared, and a difference is an error.
* transformers' micro-batch is the better of MICRO_BATCHES, each measured in every turn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import limits, peers, report, runs

ROWS = ("training", "training_long", "training_gemm")

SHAPES = {
    "training": {"max_tokens": 24, "forced": False},
    "training_long": {"max_tokens": 64, "forced": True},
}
"""What is sampled for a row: the most tokens of an answer, and whether it goes on after the end of sequence."""

TARGET = 6.0
GEMM_TARGET = 0.7
"""Of the measured peak, inside the linear layers."""

MICRO_BATCHES = (16, 64)
TURNS = 3
TOLERANCE = 2e-3
"""Relative difference of the two sides' gradient norms that rounding may cause."""

TIMEOUT_S = 600.0


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """Sample once per shape, then measure both sides in turn.

    Raises:
        PeerError: a side did not finish, or the two gradients differ.
    """
    from headrace import models
    from headrace.config import Config

    config = Config.load(runs.ADDITION)
    found: dict[str, report.Row] = {}
    peak = limits.measured().gemm if "training_gemm" in rows else 0.0
    with _headrace(runs.ADDITION) as ours:
        if set(rows) & set(SHAPES):
            peer_settings = {
                "model": str(models.resolve(config.model.name)),
                "threads": report.cores(),
                "temperature": config.sampling.temperature,
                "clip_low": config.algorithm.clip_low,
                "clip_high": config.algorithm.clip_high,
            }
            python = peers.ensure_venv("trl")  # it holds transformers
            versions = {
                "headrace": peers.versions(Path(sys.executable), ["headrace", "torch", "transformers"]),
                "transformers": peers.versions(python, ["torch", "transformers"]),
            }
            with _transformers(python, peer_settings) as theirs:
                for name in SHAPES:
                    if name in rows:
                        groups = ours.ask({"do": "sample", "shape": name} | SHAPES[name], timeout_s=TIMEOUT_S)
                        turns = in_turn(name, ours, theirs, groups["groups"])
                        details = {"shape": describe(groups["groups"]), "versions": versions}
                        found[name] = gradient_row(name, turns, details)
        if "training_gemm" in rows:
            found["training_gemm"] = gemm_row(profiles(ours), peak)
    return found


def in_turn(
    name: str, ours: peers.Worker, theirs: peers.Worker, groups: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, list[float]]:
    """Seconds of each side's turns, after a warm-up of each: "headrace", and one entry per micro-batch.

    Raises:
        PeerError: the gradients differ.
    """
    samples = [sample for group in groups for sample in group]
    seconds: dict[str, list[float]] = {}
    for turn in range(TURNS + 1):
        answers = {"headrace": ours.ask({"do": "gradient", "shape": name}, timeout_s=TIMEOUT_S)}
        for size in MICRO_BATCHES:
            request = {"samples": samples, "micro_batch": size}
            answers[f"micro-batch {size}"] = theirs.ask(request, timeout_s=TIMEOUT_S)
        for side, answer in answers.items():
            check_same(answers["headrace"]["norm"], answer["norm"], side)
            print(f"{name} turn {turn}: {side} {answer['seconds']:.2f} s", flush=True)
            if turn:  # the first is the warm-up
                seconds.setdefault(side, []).append(answer["seconds"])
    return seconds


def check_same(ours: float, theirs: float, side: str) -> None:
    """Raise a PeerError unless both norms are those of one gradient."""
    if not math.isclose(ours, theirs, rel_tol=TOLERANCE):
        raise peers.PeerError(f"{side}: a gradient norm of {theirs:.6g} where headrace's is {ours:.6g}")


def gradient_row(name: str, seconds: Mapping[str, Sequence[float]], details: Mapping[str, Any]) -> report.Row:
    """headrace's median against that of transformers' better micro-batch."""
    best = min((side for side in seconds if side != "headrace"), key=lambda side: median(seconds[side]))
    answers = "64-token answers" if name == "training_long" else "examples/addition.toml"
    return report.against(
        f"gradient of a step of 8x8 samples, {answers}",
        "s",
        headrace=median(seconds["headrace"]),
        peer=median(seconds[best]),
        peer_name=f"transformers, {best}",
        target=TARGET,
        better="lower",
        details={"seconds": {side: report.summary(times) for side, times in seconds.items()}, **details},
    )


def profiles(ours: peers.Worker) -> dict[str, list[dict[str, Any]]]:
    """TURNS profiled gradients of each shape, after a warm-up that is not profiled."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, shape in SHAPES.items():
        ours.ask({"do": "sample", "shape": name} | shape, timeout_s=TIMEOUT_S)
        ours.ask({"do": "gradient", "shape": name}, timeout_s=TIMEOUT_S)
        found[name] = [ours.ask({"do": "profile", "shape": name}, timeout_s=TIMEOUT_S) for _ in range(TURNS)]
    return found


def gemm_row(found: Mapping[str, Sequence[Mapping[str, Any]]], peak: float) -> report.Row:
    """The rate inside the linear layers against the peak, in operations per second, of this machine."""
    rates = {name: [p["flops"] / p["linear_s"] / 1e9 for p in of_shape] for name, of_shape in found.items()}
    breakdowns = {
        name: {
            kind: median(p["breakdown"].get(kind, 0.0) for p in of_shape) for kind in of_shape[0]["breakdown"]
        }
        for name, of_shape in found.items()
    }
    return report.within(
        "linear layers during the gradient of examples/addition.toml",
        "GFLOP/s",
        headrace=median(rates["training"]),
        target=GEMM_TARGET * peak / 1e9,
        better="higher",
        limit=peak / 1e9,
        limit_name="GEMM peak",
        details={
            "rates": {name: report.summary(values) for name, values in rates.items()},
            "seconds": {name: [p["seconds"] for p in of_shape] for name, of_shape in found.items()},
            "breakdown_s": breakdowns,
            "other_operations_s": {name: of_shape[-1]["others"] for name, of_shape in found.items()},
        },
    )


def describe(groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The sizes that decide how much padding and packing matter."""
    samples = [sample for group in groups for sample in group]
    prompts = [len(group[0]["prompt"]) for group in groups]
    completions = [len(sample["completion"]) for sample in samples]
    return {
        "groups": len(groups),
        "samples": len(samples),
        "padded_tokens": len(samples) * (max(prompts) + max(completions)),
        "packed_tokens": sum(prompts) + sum(completions) - len(samples),
        "completion_tokens": completions,
    }


def _headrace(config: Path, overrides: Sequence[str] = ()) -> peers.Worker:
    return peers.Worker(
        "headrace",
        [sys.executable, str(peers.SCRIPTS / "headrace_gradient.py")],
        {"config": str(config), "overrides": list(overrides)},
        start_timeout_s=TIMEOUT_S,
        environment=runs.threads(),
    )


def _transformers(python: Path, settings: Mapping[str, Any]) -> peers.Worker:
    return peers.Worker(
        "transformers",
        [str(python), str(peers.SCRIPTS / "transformers_gradient.py")],
        settings,
        start_timeout_s=TIMEOUT_S,
        environment=runs.threads() | {"GLIBC_TUNABLES": runs.KEEP_MEMORY, "HF_HUB_OFFLINE": "1"},
    )
