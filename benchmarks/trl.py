"""Row `trl`: headrace against TRL's GRPO, time to the same reward on `examples/addition.toml`.

One pair in one call: first headrace, then TRL, each alone with every core. Both start from the same weights,
see the same tasks in the same order, sample as many completions per step at the same temperature, score them
with the same code and use the same loss and optimizer settings.

Invariants
* Time is training time: from the start of the first step to the end of the step that reached the level. No
  installing, loading or evaluation is in it.
* Both sides are held to one level. It is the target, or, when a side did not reach it in its steps, the
  highest that both reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import peers, report

if TYPE_CHECKING:
    from headrace.config import Config

ROW = "trl"
CONFIG = peers.BENCHMARKS.parent / "examples" / "addition.toml"
SCRIPT = peers.BENCHMARKS / "peer_scripts" / "trl_grpo.py"

WINDOW = 3
"""The level of a step is the mean reward of this many steps up to it."""

TRL_MICRO_BATCH = 16
"""Samples per forward and backward in TRL: its fastest of 8, 16 and 64 here."""

TRL_MALLOC = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 1 << 32), ("trim_threshold", 1 << 34), ("top_pad", 1 << 26))
)
"""glibc keeps TRL's memory between steps, as headrace makes it do for itself: a third less time together with
the micro-batch."""

START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0

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


def run_headrace(steps: int, folder: Path) -> Curve:
    """Train with headrace in a process of its own, under `folder`."""
    run_folder = folder / "headrace"
    command = [str(Path(sys.executable).with_name("headrace")), "train", str(CONFIG)]
    command += ["--run-dir", str(run_folder), "--set", "eval.tasks=0", "--set", f"line.steps={steps}"]
    peers.run(
        command, what="headrace", timeout_s=START_TIMEOUT_S + steps * STEP_TIMEOUT_S, environment=_threads()
    )
    return Curve.read(run_folder / "metrics.jsonl")


def run_trl(python: Path, job: dict[str, Any], folder: Path) -> Curve:
    """Train with TRL in a process of its own, under `folder`."""
    job_path, steps_path = folder / "job.json", folder / "trl.jsonl"
    job_path.write_text(json.dumps(job), encoding="utf-8")
    environment = _threads() | {
        "PYTHONPATH": str(peers.SOURCES),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": TRL_MALLOC,
    }
    peers.run(
        [str(python), str(SCRIPT), str(job_path), str(steps_path)],
        what="TRL",
        timeout_s=START_TIMEOUT_S + job["steps"] * STEP_TIMEOUT_S,
        environment=environment,
    )
    return Curve.read(steps_path)


def _threads() -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(report.cores())}


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    level = f"mean reward {result['level']:.3f}"
    table = Table(title=f"examples/addition.toml, {result['steps']} steps, to {level}")
    for heading in ("", "seconds to it", "steps to it", "seconds per step", "reward, last steps"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in ("headrace", "trl"):
        side = result[name]
        last = side["step_rewards"][-WINDOW:]
        table.add_row(
            name,
            f"{side['seconds_to_level']:.1f}",
            str(side["steps_to_level"]),
            f"{side['seconds_per_step']:.1f}",
            f"{sum(last) / len(last):.3f}",
        )
    console = Console()
    console.print(table)
    if not result["target_reached_by_both"]:
        console.print(
            f"The target {result['target']} was not reached by both: {level} is the highest that both did."
        )
    console.print(f"headrace is {result['ratio']:.2f} times as fast as TRL")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the row. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/trl.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps of each side (default 15)")
    parser.add_argument("--target", type=float, default=0.9, help="mean reward to reach (default 0.9)")
    options = parser.parse_args(arguments)
    if options.steps < WINDOW:
        parser.error(f"--steps must be at least {WINDOW}: the level is the mean of that many steps")

    from headrace import models
    from headrace.config import Config
    from headrace.errors import HeadraceError

    try:
        config = Config.load(CONFIG)
        python = peers.ensure_venv(ROW)
        job = peer_job(config, models.resolve(config.model.name), options.steps, TRL_MICRO_BATCH)
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
            ours = run_headrace(options.steps, Path(scratch))
            theirs = run_trl(python, job, Path(scratch))
        settings = {key: value for key, value in job.items() if key not in ("model", "tasks")}
        result = compare(ours, theirs, options.target) | {
            "steps": options.steps,
            "versions": {
                "headrace": peers.versions(Path(sys.executable), ["headrace", "torch", "transformers"]),
                "trl": peers.versions(python, ["trl", "torch", "transformers", "accelerate"]),
            },
            "settings": {"model": config.model.name} | settings,
            "machine": report.machine(),
        }
    except (peers.PeerError, HeadraceError) as error:
        print(f"{ROW}: {error}", file=sys.stderr)
        return 1
    _show(result)
    print(f"written: {report.write(ROW, result).relative_to(peers.BENCHMARKS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
