"""One step's line in `metrics.jsonl`.

Keys are flat; times are wall seconds, memory is MB (2**20 bytes), tokens are sampled tokens. A measure
that has no value in a step (the difference of no tokens) is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.line.cell import PUBLISH
from headrace.schedule import Bucket, Unit
from headrace.state.machine import resident_mb
from headrace.trainer import StepResult, TokenStatistics
from headrace.types import Group


def step_metrics(
    *,
    step: int,
    groups: Sequence[Group],
    result: StepResult,
    probe: TokenStatistics,
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
        probe: statistics over tokens of the weights that were trained, from the batch and the probe.
        seconds: wall time per unit.
        settled: tokens settled in this step, per ledger bucket.
        tokens_generated: tokens sampled in this step.
        counters: further numbers of the line.
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
        "zero_advantage_groups": gradient.zero_advantage_groups,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "clipped_ratio": statistics.clipped_ratio,
        "logprob_diff_mean": probe.logprob_diff_mean,
        "logprob_diff_max": probe.logprob_diff_max,
        "logprob_diff_tokens": probe.current,
        "ess": statistics.ess,
        "kl": statistics.kl,
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
        "memory_mb": resident_mb(),
    }
