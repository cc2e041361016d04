"""What a run came to: held-out evaluations, and the result of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """One held-out task and the greedy answer to it; `reward` is None where the environment failed."""

    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out reward: the mean reward of greedy answers, over the tasks whose environment answered.

    `skipped` tasks had prompts that do not fit the context; they are not among `tasks`.
    """

    step: int
    reward: float
    tasks: list[EvaluatedTask]
    failed: int
    skipped: int = 0


@dataclass(slots=True)
class LineResult:
    """What a run came to. `interrupted` means that it can be resumed from `run_dir`."""

    run_dir: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    before: Evaluation | None = None
    after: Evaluation | None = None
    interrupted: bool = False

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [float(m["reward_mean"]) for m in self.metrics]

    @property
    def training_seconds(self) -> float:
        """Wall time of all steps, without evaluation."""
        return sum(float(m["time_step_s"]) for m in self.metrics)
