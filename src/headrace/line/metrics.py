"""One step's line in `metrics.jsonl`, and the account from which it is made.

Keys are flat; times are wall seconds, memory is MB (2**20 bytes), tokens are sampled tokens. A measure
that has no value in a step (the difference of no tokens) is null.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.line.cell import PUBLISH
from headrace.schedule import Bucket, Unit
from headrace.state.machine import resident_mb
from headrace.trainer import Divergence, StepResult
from headrace.types import Group


class StepAccount:
    """The step that is under way: what the line's totals were when it began, and how long it has taken.

    Attributes:
        books: the ledger's totals at its beginning.
        counters: the line's other totals at its beginning.
    """

    def __init__(self, books: dict[str, int], counters: dict[str, int], elapsed_s: float = 0.0) -> None:
        self.books, self.counters = books, counters
        self._elapsed_before = elapsed_s
        self.start_clock()

    def start_clock(self) -> None:
        """Count from now on, beside what the step took before the run was resumed."""
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Wall seconds of the step so far."""
        return time.perf_counter() - self._started + self._elapsed_before

    def close(
        self,
        *,
        step: int,
        groups: Sequence[Group],
        result: StepResult,
        mismatch: Divergence,
        seconds: Mapping[str, float],
        books: dict[str, int],
        counters: dict[str, int],
    ) -> dict[str, Any]:
        """The step's metrics; the next step begins here. `books` and `counters` are the totals now."""
        before, elapsed_s = self.books, self.elapsed_s
        changes = {name: counters[name] - self.counters[name] for name in counters}
        self.books, self.counters = books, counters
        self._elapsed_before = 0.0
        self.start_clock()
        return step_metrics(
            step=step,
            groups=groups,
            result=result,
            mismatch=mismatch,
            seconds=seconds,
            time_step_s=elapsed_s,
            settled={bucket: books[bucket] - before[bucket] for bucket in Bucket},
            tokens_generated=books["generated"] - before["generated"],
            tokens_generated_total=books["generated"],
            counters=changes,
        )


def step_metrics(
    *,
    step: int,
    groups: Sequence[Group],
    result: StepResult,
    mismatch: Divergence,
    seconds: Mapping[str, float],
    time_step_s: float,
    settled: Mapping[Bucket, int],
    tokens_generated: int,
    tokens_generated_total: int,
    counters: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that a step is known by.

    Args:
        step: steps completed with this one, which is also the version it published.
        groups: the groups it consumed.
        mismatch: trainer against generator under the weights that were trained.
        seconds: wall time per unit.
        settled: tokens settled in this step, per ledger bucket.
        tokens_generated: tokens sampled in this step.
        counters: further events of the step.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    gradient = result.gradient
    statistics = gradient.statistics
    busy = sum(seconds.values())
    return {
        "step": step,
        "policy_version": step,
        "reward_mean": sum(rewards) / len(rewards),
        "completed_ratio": sum(t.complete for t in trajectories) / len(trajectories),
        "completion_tokens_mean": sum(t.num_sampled for t in trajectories) / len(trajectories),
        "turns_mean": sum(t.turns for t in trajectories) / len(trajectories),
        "rows_split": sum(len(t.earlier) for t in trajectories),
        "zero_advantage_groups": gradient.zero_advantage_groups,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "clipped_ratio": statistics.clipped_ratio,
        "logprob_diff_mean": mismatch.difference_mean,
        "logprob_diff_max": mismatch.difference_max if mismatch.tokens else None,
        "logprob_diff_tokens": mismatch.tokens,
        "mismatch_ess": mismatch.ess,
        "mismatch_kl": mismatch.kl,
        "ess": statistics.drift.ess,
        "kl": statistics.drift.kl,
        "staleness_mean": statistics.staleness_mean,
        "staleness_max": statistics.staleness_max,
        "time_step_s": time_step_s,
        "time_decode_s": seconds.get(Unit.DECODE, 0.0),
        "time_gradient_s": seconds.get(Unit.GRADIENT, 0.0),
        "time_optimizer_s": seconds.get(Unit.OPTIMIZER_STEP, 0.0),
        "time_publish_s": seconds.get(PUBLISH, 0.0),
        "time_idle_s": seconds.get(Unit.WAIT, 0.0),
        "time_other_s": max(0.0, time_step_s - busy),
        "tokens_generated": tokens_generated,
        "tokens_generated_total": tokens_generated_total,
        "tokens_trained": gradient.tokens_trained,
        "effective_tokens_per_s": settled.get(Bucket.TRAINED, 0) / time_step_s,
        **{f"ledger_{bucket}": count for bucket, count in settled.items()},
        **counters,
        "threads": torch.get_num_threads(),
        "memory_mb": resident_mb(),
    }


def token_rates(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens per second of Decode and of Gradient units in a step."""
    decode = metrics["tokens_generated"] / metrics["time_decode_s"] if metrics["time_decode_s"] else 0.0
    train = metrics["tokens_trained"] / metrics["time_gradient_s"] if metrics["time_gradient_s"] else 0.0
    return decode, train
