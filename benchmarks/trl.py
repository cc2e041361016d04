"""Rows `trl`, `trl_int8`, `trl_memory`, `busy_share`: headrace against TRL's GRPO on `examples/addition.toml`.

One session: headrace in float32, headrace with int8 rollouts, then TRL once for all rows, each alone with every
core. All start from the same weights, see the same tasks in the same order, sample as many completions per
step at the same temperature, score them with the same code and use the same optimizer settings. The loss is the
same too, except that int8 rollouts are corrected for (`ratio = "proximal"`).

Invariants
* Time is training time: from the start of the first step to the end of the step that reached the level. No
  installing, loading or evaluation is in it.
* Both sides of a row are held to one level. It is the target, or, when a side did not reach it in its steps,
  the highest that both reached.
* Peak memory is counted in the same way on both sides, from start to end of the process and its children.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import peers, report, runs

if TYPE_CHECKING:
    from headrace.config import Config

ROWS = ("trl", "trl_int8", "trl_memory", "busy_share")

CONFIG = runs.ADDITION
SCRIPT = peers.BENCHMARKS / "peer_scripts" / "trl_grpo.py"

STEPS = 15
"""Optimizer steps of each side."""

LEVEL = 0.9
"""The mean reward to reach."""

WINDOW = 3
"""The level of a step is the mean reward of this many steps up to it."""

TARGETS = {"trl": 5.0, "trl_int8": 6.0, "trl_memory": 1.0, "busy_share": 0.9}

TRL_MICRO_BATCH = 16
"""Samples per forward and backward in TRL: its fastest of 8, 16 and 64 here."""

LOSS_TYPES = {"token": "dapo", "sequence": "grpo"}
"""`algorithm.loss_aggregation` in TRL's words."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one side's steps took and earned.

    Args:
        seconds: wall seconds of each step.
        rewards: mean reward of each step.
    """

    seconds: tuple[float, ...]
    rewards: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> Curve:
        """From JSON lines with `time_step_s` and `reward_mean`, one per step."""
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return cls(tuple(x["time_step_s"] for x in lines), tuple(x["reward_mean"] for x in lines))

    @property
    def levels(self) -> list[float]:
        """The mean reward of each WINDOW steps in a row; `levels[i]` ends with step i + WINDOW - 1."""
        return [
            sum(self.rewards[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(self.rewards) + 1)
        ]

    def steps_to(self, level: float) -> int | None:
        """How many steps it took until the last WINDOW of them reached `level`; None if they never did."""
        reached = [i for i, mean in enumerate(self.levels) if mean >= level - 1e-9]  # the sum's rounding
        return reached[0] + WINDOW if reached else None

    def time_to(self, level: float) -> float | None:
        """Wall seconds from the start of training to the end of that step; None if it never came."""
        steps = self.steps_to(level)
        return None if steps is None else sum(self.seconds[:steps])


def common_level(ours: Curve, theirs: Curve, target: float) -> float:
    """The target, or the highest level that both curves reached if one of them stayed below it.

    Raises:
        ValueError: a curve is shorter than WINDOW steps, so it has no level.
    """
    if not ours.levels or not theirs.levels:
        raise ValueError(f"both sides need at least {WINDOW} steps")
    return min(target, max(ours.levels), max(theirs.levels))


def compare(ours: Curve, theirs: Curve, target: float) -> dict[str, Any]:
    """Both sides' steps and seconds to the same level; `ratio` is TRL's seconds over headrace's."""
    level = common_level(ours, theirs, target)
    result: dict[str, Any] = {"target": target, "level": level, "target_reached_by_both": level == target}
    for name, curve in (("headrace", ours), ("trl", theirs)):
        result[name] = {
            "seconds_to_level": curve.time_to(level),
            "steps_to_level": curve.steps_to(level),
            "seconds_per_step": sum(curve.seconds) / len(curve.seconds),
            "step_rewards": curve.rewards,
            "step_seconds": curve.seconds,
        }
    return {"ratio": result["trl"]["seconds_to_level"] / result["headrace"]["seconds_to_level"], **result}


def peer_job(config: Config, model: Path, steps: int, micro_batch: int) -> dict[str, Any]:
    """What TRL's side needs to know: the same weights, tasks and settings as headrace's."""
    from headrace.environments import load_environment
    from headrace.environments.task_stream import TaskStream

    environment = load_environment(config.environment.name, config.environment.options)
    tasks = TaskStream(environment, "train", config.line.seed)
    algorithm, trainer = config.algorithm, config.trainer
    return {
        "model": str(model),
        "dtype": config.model.dtype,
        "environment": config.environment.name,
        "options": config.environment.options,
        "tasks": [tasks.get(i) for i in range(steps * config.line.groups_per_step)],
        "steps": steps,
        "seed": config.line.seed,
        "threads": report.cores(),
        "micro_batch": micro_batch,
        "groups_per_step": config.line.groups_per_step,
        "group_size": algorithm.group_size,
        "temperature": config.sampling.temperature,
        "max_tokens": config.sampling.max_tokens,
        "loss_type": LOSS_TYPES[algorithm.loss_aggregation],
        "scale_rewards": "group" if algorithm.normalize_std else "none",
        "kl_coef": algorithm.kl_coef,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "mask_truncated": algorithm.mask_truncated,
        "learning_rate": trainer.learning_rate,
        "schedule": trainer.schedule,
        "warmup_steps": trainer.warmup_steps,
        "betas": trainer.betas,
        "eps": trainer.eps,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
    }


@dataclass(frozen=True, slots=True)
class Run:
    """One side's run: its curve, peak memory in MB, and the lines it logged."""

    curve: Curve
    peak_mb: float
    lines: list[dict[str, Any]]


def run_headrace(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """Train with headrace in a process of its own, into `folder`."""
    with runs.PeakMemory() as memory:
        lines = runs.train(CONFIG, folder, steps=STEPS, overrides=overrides)
    return Run(Curve.read(folder / "metrics.jsonl"), memory.megabytes, lines)


def run_trl(python: Path, job: dict[str, Any], folder: Path) -> Run:
    """Train with TRL in a process of its own, under `folder`."""
    job_path, steps_path = folder / "job.json", folder / "trl.jsonl"
    job_path.write_text(json.dumps(job), encoding="utf-8")
    environment = runs.threads() | {
        "PYTHONPATH": str(peers.SOURCES),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": runs.KEEP_MEMORY,
    }
    with runs.PeakMemory() as memory:
        peers.run(
            [str(python), str(SCRIPT), str(job_path), str(steps_path)],
            what="TRL",
            timeout_s=runs.START_TIMEOUT_S + job["steps"] * runs.STEP_TIMEOUT_S,
            environment=environment,
        )
    return Run(Curve.read(steps_path), memory.megabytes, runs.read_lines(steps_path))


def time_row(name: str, ours: Run, theirs: Run, peer_name: str, details: Mapping[str, Any]) -> report.Row:
    """Seconds to the common level."""
    result = compare(ours.curve, theirs.curve, LEVEL)
    rollouts = ", int8 rollouts" if name == "trl_int8" else ""
    return report.against(
        f"examples/addition.toml to mean reward {result['level']:.2f}{rollouts}",
        "s",
        headrace=result["headrace"]["seconds_to_level"],
        peer=result["trl"]["seconds_to_level"],
        peer_name=peer_name,
        target=TARGETS[name],
        better="lower",
        details={**result, **details},
    )


def memory_row(ours: Run, theirs: Run, peer_name: str, details: Mapping[str, Any]) -> report.Row:
    """Peak resident memory of the whole process trees."""
    return report.against(
        "peak resident memory, examples/addition.toml",
        "MB",
        headrace=ours.peak_mb,
        peer=theirs.peak_mb,
        peer_name=peer_name,
        target=TARGETS["trl_memory"],
        better="lower",
        details=details,
    )


def busy_row(metrics: Sequence[Mapping[str, Any]], details: Mapping[str, Any]) -> report.Row:
    """The share of all step time that went into decode and gradient units."""
    step_s = runs.total(metrics, "time_step_s")
    shares = {
        unit: runs.total(metrics, f"time_{unit}_s") / step_s
        for unit in ("decode", "gradient", "optimizer", "publish", "idle", "other")
    }
    return report.within(
        "step time inside decode and gradient units, examples/addition.toml",
        "share",
        headrace=shares["decode"] + shares["gradient"],
        target=TARGETS["busy_share"],
        better="higher",
        details={"shares": shares, "step_seconds": [step["time_step_s"] for step in metrics], **details},
    )


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """Run what the rows need, and TRL once for all of them.

    Raises:
        PeerError: a side cannot be installed or did not finish.
    """
    from headrace import models
    from headrace.config import Config

    config = Config.load(CONFIG)
    job = peer_job(config, models.resolve(config.model.name), STEPS, TRL_MICRO_BATCH)
    details: dict[str, Any] = {
        "steps": STEPS,
        "settings": {"model": config.model.name}
        | {key: value for key, value in job.items() if key not in ("model", "tasks")},
        "versions": {"headrace": peers.versions(Path(sys.executable), ["headrace", "torch", "transformers"])},
    }
    ours: dict[str, Run] = {}
    found: dict[str, report.Row] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch)
        if set(rows) - {"trl_int8"}:
            ours["trl"] = run_headrace(folder / "float32")
        if "trl_int8" in rows:
            ours["trl_int8"] = run_headrace(folder / "int8", runs.INT8)
        if "busy_share" in rows:
            found["busy_share"] = busy_row(ours["trl"].lines, details)
        if set(rows) - {"busy_share"}:
            python = peers.ensure_venv("trl")
            versions = peers.versions(python, ["trl", "torch", "transformers", "accelerate"])
            details["versions"] |= {"trl": versions}
            theirs = run_trl(python, job, folder)
            details["peak_mb"] = {name: run.peak_mb for name, run in ours.items()} | {"TRL": theirs.peak_mb}
            peer_name = f"TRL {versions['trl']}"
            for name in ("trl", "trl_int8"):
                if name in rows:
                    found[name] = time_row(name, ours[name], theirs, peer_name, details)
            if "trl_memory" in rows:
                found["trl_memory"] = memory_row(ours["trl"], theirs, peer_name, details)
    return found
