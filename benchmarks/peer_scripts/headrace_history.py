"""Writes the folder of a run of many steps that was never run: `headrace_history.py FOLDER STEPS`.

A step has 64 trajectories of 23 tokens. Its frames are those of a real line over `examples/addition.toml`: admissions,
Decode units of 8 engine steps, rewards, one gradient for each group, the step. All of it can be folded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.config import Config
from headrace.measures import Divergence, SampleOutcome, TokenStatistics
from headrace.runs.events import (
    SCHEMA,
    AttemptEnded,
    CheckpointWritten,
    ContributionOpened,
    ContributionReceived,
    Event,
    GradientTaken,
    GroupAdmitted,
    GroupCommitted,
    Published,
    RunStarted,
    StepTaken,
    TokenRow,
    TokensDrawn,
    TurnEnded,
    WorldAnswered,
    encode,
)
from headrace.runs.folder import METRICS, RunFolder
from headrace.schedule import Bucket
from headrace.state.journal import Journal
from headrace.types import TrajectoryId

GROUPS, SAMPLES, TOKENS, UNIT = 8, 8, 23, 8
CELL, KERNELS = "local", "avx512-vnni torch 2.9.0 0123456789abcdef"
CHECKPOINT_EVERY = 100

# Of a step of a real run, by kinds of numbers; what reading costs depends on how many there are.
RATIOS = (
    "reward_mean completed_ratio loss grad_norm learning_rate clipped_ratio clamped_ratio logprob_diff_mean "
    "logprob_diff_max mismatch_ess mismatch_kl ess kl staleness_mean time_step_s time_decode_s time_gradient_s "
    "time_optimizer_s time_publish_s time_idle_s time_other_s effective_tokens_per_s completion_tokens_mean "
    "turns_mean memory_mb"
).split()
COUNTS = (
    "rows_split zero_advantage_groups logprob_diff_tokens staleness_max environment_failures groups_failed "
    "groups_replaced tasks_skipped preemptions prefix_hit_tokens kv_host_hit_tokens kv_disk_hit_tokens threads"
).split()


def metrics_of(step: int) -> dict[str, float]:
    tokens = GROUPS * SAMPLES * TOKENS
    return {
        "step": step,
        "policy_version": step,
        **{name: 0.1234567890123 + step * 1e-5 for name in RATIOS},
        **dict.fromkeys(COUNTS, 12),
        "tokens_generated": tokens,
        "tokens_generated_total": step * tokens,
        "tokens_trained": tokens,
        **{f"ledger_{bucket}": tokens if bucket is Bucket.TRAINED else 0 for bucket in Bucket},
    }


def statistics(tokens: int) -> TokenStatistics:
    sums = Divergence(tokens, 1.23456789e-5, 3.456789e-6, tokens + 1e-7, tokens + 2e-7, 1.23456e-9)
    return TokenStatistics(sums, sums, 3, 0, tokens, tokens // 2, 1)


def frames_of(step: int) -> Iterator[list[Event]]:
    """What happens up to the end of a step, counted from 1."""
    groups = range((step - 1) * GROUPS, step * GROUPS)
    ids = [TrajectoryId(group, sample, 0) for group in groups for sample in range(SAMPLES)]
    prompt = tuple(range(40))
    for group in groups:
        task = {"prompt": f"What is {group} + {step}? Answer with the number only.", "answer": group + step}
        yield [GroupAdmitted(group, task, prompt, group + 1, 0)]
    for begin in range(0, TOKENS, UNIT):
        count = min(UNIT, TOKENS - begin)
        last = begin + count == TOKENS
        rows = [TokenRow(key, count, False, "stop" if last else None) for key in ids]
        drawn = range(count * len(ids))
        logprobs = [-((number * 7919 + step) % 1000 + 1) / 1024 for number in drawn]
        unit: list[Event] = [TokensDrawn.pack(CELL, step - 1, rows, [n + step for n in drawn], logprobs)]
        if last:
            unit += [TurnEnded(key, f"The sum of both is {key.group + step}.", None) for key in ids]
        yield unit
    for key in ids:
        reward = float(key.sample % 2)
        yield [
            WorldAnswered(key, reward, None, None, True, {}, None, 0.00012345),
            AttemptEnded(key, reward, None, again=False),
        ]
    commits: list[Event] = [GroupCommitted(group) for group in groups]
    yield [*commits, ContributionOpened(step - 1, CELL, 0, KERNELS)]
    for group in groups:
        samples = tuple(
            SampleOutcome(key, Bucket.TRAINED, TOKENS, 0.93541434 if key.sample % 2 else -0.93541434)
            for key in ids
            if key.group == group
        )
        tokens = SAMPLES * TOKENS
        yield [GradientTaken(step - 1, (group,), samples, 0, -0.0123456789, tokens, 1, 2, statistics(tokens))]
    yield [ContributionReceived(step - 1, f"{CELL}/{step - 1}", "d" * 32, 0)]
    yield [StepTaken(step, True, f"{step:064x}", f"{step:032x}", 2, metrics_of(step))]
    yield [Published(CELL, step)]


def write(path: Path, steps: int) -> None:
    """A run's folder, with the journal and the metrics of so many steps."""
    config = Config.from_dict(
        {
            "model": {"name": "smollm2-135m"},
            "environment": {"name": "arithmetic"},
            "sampling": {"max_tokens": TOKENS + 1},
            "algorithm": {"group_size": SAMPLES},
            "line": {"groups_per_step": GROUPS, "steps": steps, "checkpoint_every": CHECKPOINT_EVERY},
        }
    )
    with RunFolder.create(path, config) as folder, (path / METRICS).open("w", encoding="utf-8") as log:
        journal = Journal.open(folder.journal_path)
        start = RunStarted(SCHEMA, config.to_dict(), 0, "0" * 32, "0" * 64, False, False, 2, KERNELS)
        journal.record(*encode([start]))
        for step in range(1, steps + 1):
            for frame in frames_of(step):
                journal.record(*encode(frame))
            if step % CHECKPOINT_EVERY == 0:
                journal.record(*encode([CheckpointWritten(step)]))
            journal.commit()
            log.write(json.dumps(metrics_of(step)) + "\n")
        journal.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
