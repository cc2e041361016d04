"""Rows `int8_ess`, `int8_curve_addition`, `int8_curve_long`: does the policy survive int8 rollouts?

`int8_ess` samples more than 10,000 tokens at temperature 1 from the quantised policy, on prompts of several kinds, and
scores them with the trainer's float32 forward. The curves train each task with both formats, seed by seed in turn.

Invariants
* A curve is held against seed noise: the difference of the formats' means over the seeds, in standard deviations of
  one seed. It may be two standard errors of such a difference.
* Two numbers stand for a curve, its end (the mean of the last steps) and its area (the mean of all); the row's value is
  the worse of the two.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from benchmarks import peers, report, runs

ROWS = ("int8_ess", "int8_curve_addition", "int8_curve_long")

MODEL = "smollm2-135m"
ESS_TARGET = 0.9
TOKENS = 10_000
SAMPLES = 4
MAX_TOKENS = 128
TIMEOUT_S = 1800.0

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short letter to a friend about a walk in the snow.",
    "How do I boil an egg?",
    "Name three rivers in Europe and one thing that each is known for.",
    "What is the difference between a frog and a toad?",
    "Explain to a child what money is.",
    "Write a Python function that reverses a string.",
    "Tell me a story about a lighthouse keeper.",
)
"""Plain English, beside the tasks of environments."""

ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "addition": ("arithmetic", {}),
    "multiplication": (
        "arithmetic",
        {"operators": ["*"], "maximum": 20, "prompt": "Compute {a} {op} {b} step by step."},
    ),
    "chain_sum": ("reasoning_gym:chain_sum", {}),
    "spell_backward": ("reasoning_gym:spell_backward", {}),
    "word_sorting": ("reasoning_gym:word_sorting", {}),
    "letter_counting": ("reasoning_gym:letter_counting", {}),
}
TASKS_OF_EACH = 8

CURVES = {
    "int8_curve_addition": runs.ADDITION,
    "int8_curve_long": runs.ADDITION.with_name("plain_words.toml"),
}
STEPS = 15
SEEDS = (0, 1, 2)
LAST_STEPS = 3
STANDARD_ERRORS = 2.0


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """Each row is measured by itself.

    Raises:
        PeerError: a run or a worker did not finish, or the formats gave the same numbers.
    """
    found = {}
    for name in rows:
        if name == "int8_ess":
            found[name] = ess_row(mismatch(MODEL, sources(), TOKENS))
        else:
            found[name] = curve_row(name, curves(CURVES[name]))
    return found


def sources() -> dict[str, list[str]]:
    """Prompts of every kind, by its name."""
    from headrace.environments import load_environment

    found = {"questions": list(QUESTIONS)}
    for name, (environment, options) in ENVIRONMENTS.items():
        tasks = load_environment(environment, options).tasks("train")
        found[name] = [tasks[i]["prompt"] for i in range(TASKS_OF_EACH)]
    return found


def mismatch(
    model: str, prompts: Mapping[str, Sequence[str]], tokens: int, weight_format: str = "int8"
) -> dict[str, Any]:
    """Sample from the policy in `weight_format` and score in float32, in a process of its own."""
    settings = {"model": model, "engine": {"weight_format": weight_format}}
    command = [sys.executable, str(peers.SCRIPTS / "headrace_mismatch.py")]
    request = {"sources": prompts, "samples": SAMPLES, "max_tokens": MAX_TOKENS, "tokens": tokens}
    with peers.Worker(
        "int8_ess", command, settings, start_timeout_s=TIMEOUT_S, environment=runs.threads()
    ) as worker:
        return worker.ask(request, timeout_s=TIMEOUT_S)


def ess_row(result: Mapping[str, Any]) -> report.Row:
    """The share over all tokens; that of each kind of prompt is in the details.

    Raises:
        PeerError: the sampled policy is the float32 one to within rounding, so nothing was quantised.
    """
    everything = result["all"]
    if everything["difference_mean"] < 1e-5:
        raise peers.PeerError(
            "int8_ess: the sampled policy is the float32 one; is engine.weight_format in use?"
        )
    return report.within(
        f"per-token effective sample size of int8 rollouts, {everything['tokens']} tokens",
        "share",
        headrace=everything["ess"],
        target=ESS_TARGET,
        better="higher",
        details={
            **result,
            "model": MODEL,
            "samples": SAMPLES,
            "max_tokens": MAX_TOKENS,
            "questions": QUESTIONS,
            "environments": ENVIRONMENTS,
            "versions": peers.versions(Path(sys.executable), ["headrace", "torch", "transformers"]),
        },
    )


def curves(config: Path) -> dict[str, list[list[float]]]:
    """Mean reward of each step, for each seed, by weight format."""
    found: dict[str, list[list[float]]] = {"float32": [], "int8": []}
    for seed in SEEDS:
        for weights, rewards in found.items():
            what = f"{config.stem}, {weights}, seed {seed}"
            print(what, flush=True)
            overrides = (f"line.seed={seed}", *(runs.INT8 if weights == "int8" else ()))
            # A folder per run: each leaves gigabytes of checkpoints.
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
                metrics = runs.train(
                    config, Path(scratch) / "run", steps=STEPS, overrides=overrides, what=what
                )
            rewards.append([float(step["reward_mean"]) for step in metrics])
    return found


def curve_row(name: str, found: Mapping[str, Sequence[Sequence[float]]]) -> report.Row:
    """How many standard deviations of a seed the formats' means are apart."""
    ends = {weights: [fmean(c[-LAST_STEPS:]) for c in of_seeds] for weights, of_seeds in found.items()}
    areas = {weights: [fmean(c) for c in of_seeds] for weights, of_seeds in found.items()}
    distances = {
        "end": distance(ends["int8"], ends["float32"]),
        "area": distance(areas["int8"], areas["float32"]),
    }
    seeds = len(found["int8"])
    return report.within(
        f"reward of int8 rollouts against float32's, examples/{CURVES[name].name}, {seeds} seeds",
        "SD",
        headrace=max(distances.values()),
        target=STANDARD_ERRORS * (2 / seeds) ** 0.5,
        details={"distances": distances, "ends": ends, "areas": areas, "curves": found, "seeds": list(SEEDS)},
    )


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """|mean − mean| over the pooled standard deviation of one seed (Cohen's d, without its sign).

    The standard error of this difference of two means of n seeds is √(2/n) of that deviation.
    """
    pooled = ((variance(ours) + variance(theirs)) / 2) ** 0.5
    difference = abs(fmean(ours) - fmean(theirs))
    return difference / max(pooled, 1e-9)  # seeds that agree exactly must not divide by zero
