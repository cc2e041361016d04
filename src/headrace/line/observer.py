"""What a run tells whoever watches it: the terminal, a test, a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.runs.results import Evaluation


@dataclass(frozen=True, slots=True)
class LineStatus:
    """The line at one moment.

    Attributes:
        step: steps completed; `steps` is the run's number.
        doing: the unit that runs next, or what the line waits for.
        reward_history: mean reward of each completed step.
        decode_tokens_per_s, train_tokens_per_s: tokens per second of Decode and Gradient units, last step or this.
        staleness_mean: mean staleness of the last step's tokens, in versions.
        decoding, at_environment, ready: trajectories in the engine, at their environment; groups ready to train.
        committed: groups committed to the current step, of `groups_per_step`.
        seconds_left: expected seconds to the end, None before the first step.
    """

    step: int
    steps: int
    doing: str
    reward_history: tuple[float, ...]
    decode_tokens_per_s: float
    train_tokens_per_s: float
    staleness_mean: float
    decoding: int
    at_environment: int
    ready: int
    committed: int
    groups_per_step: int
    seconds_left: float | None


class Observer:
    """Gets told; every method may be overridden, none need be.

    Attributes:
        output: descriptor for what the environment's code prints; standard error by default.
    """

    output: int | None = None

    def on_message(self, text: str) -> None:
        """Something worth a line."""

    def on_status(self, status: LineStatus) -> None:
        """Before each unit of work."""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """After each step, with its line of `metrics.jsonl`."""

    def on_evaluation(self, name: str, evaluation: Evaluation) -> None:
        """After a held-out evaluation; `name` is "before" or "after"."""
