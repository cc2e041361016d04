"""The step under way in seconds and counts, its line in `metrics.jsonl`, and what of it is told and logged.

Keys of a metrics line are flat; times are wall seconds, memory is MB (2**20 bytes), tokens are sampled tokens. A
measure that has no value in a step (the difference of no tokens) is null.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import NonFiniteError
from headrace.line.cell import Cell
from headrace.line.observer import LineStatus, Observer
from headrace.runs import events as happened
from headrace.runs.folder import CONFIG, RunFolder, json_safe
from headrace.runs.state import RunState, Settled, Status
from headrace.schedule import Bucket
from headrace.schedule.units import Stepped, Unit, UnitKind
from headrace.state.machine import resident_mb
from headrace.types import Trajectory, TrajectoryId

if TYPE_CHECKING:
    from headrace.line.line import ProductionLine

WAIT = "wait"
"""What a line is doing that has nothing to run until an environment answers."""


class Account:
    """What a line measures and tells beside its state.

    Attributes:
        seconds: wall time per kind of unit, in the step under way.
        metrics: the steps' lines.
    """

    def __init__(self, state: RunState, folder: RunFolder, observer: Observer) -> None:
        self.state, self.folder, self.observer = state, folder, observer
        self.seconds: dict[str, float] = defaultdict(float)
        self.metrics: list[dict[str, Any]] = folder.metrics()
        self._counters: dict[str, int] = {}
        self._rates = (0.0, 0.0)
        self._elapsed_before = 0.0
        self._started = time.perf_counter()

    # Time

    @contextmanager
    def booked(self, name: str) -> Iterator[None]:
        """Book the block's wall time under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def load(self, data: Mapping[str, Any]) -> None:
        """What `to_dict` kept: an earlier process has begun the step under way."""
        self.seconds = defaultdict(float, data["seconds"])
        self._elapsed_before = data["elapsed_s"]

    def start_clock(self, cells: Mapping[str, Cell]) -> None:
        """Count from now on, beside what an earlier process has taken for the step."""
        self._counters = engine_counters(cells)
        self._started = time.perf_counter()

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the step under way."""
        return {"seconds": dict(self.seconds), "elapsed_s": self._elapsed_s}

    @property
    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started + self._elapsed_before

    # Steps

    def close_step(self, state: RunState, stepped: Stepped, cells: Mapping[str, Cell]) -> dict[str, Any]:
        """The metrics of the step that is about to be recorded; the next one begins here."""
        counters = engine_counters(cells)
        metrics = step_metrics(
            state,
            stepped,
            self.seconds,
            self._elapsed_s,
            {name: counters[name] - self._counters.get(name, 0) for name in counters},
        )
        self._rates = token_rates(metrics)
        self.load({"seconds": {}, "elapsed_s": 0.0})
        self.start_clock(cells)
        return json_safe(metrics)  # type: ignore[no-any-return]

    def on_event(self, event: happened.Event, settled: Sequence[Settled]) -> None:
        """Log a step that is on record, and tell it."""
        if not isinstance(event, happened.StepTaken):
            return
        self.log(event, settled)
        self.observer.on_step(event.metrics)
        if event.updated:
            return
        times = self.state.taught_nothing
        self.observer.on_message(
            f"step {event.step} taught nothing: within each group all rewards were equal. Now and then that is fine; "
            "if it goes on, the tasks are too easy or too hard, or the reward needs partial credit"
            if times == 1
            else f"step {event.step} taught nothing either, {times} steps by now"
        )

    def log(self, event: happened.StepTaken, settled: Sequence[Settled]) -> None:
        """Write a step into the run folder's logs."""
        self.folder.append_trajectories(event.step, [one for one in settled if one.step is not None])
        self.folder.append_metrics(event.metrics)
        self.metrics.append(event.metrics)

    # What is told

    def status(self, line: ProductionLine, units: Sequence[Unit]) -> LineStatus:
        state, config = self.state, line.config
        recent = [m["time_step_s"] for m in self.metrics[-5:]]
        left = config.line.steps - state.version
        waiting = len(line.rollouts.at_environment)
        ready = sum(group.finished for group in state.groups.values()) - len(line.admission.committed)
        busy = units[0].kind.value if units else f"waiting on {waiting} rewards"
        return LineStatus(
            step=state.version,
            steps=config.line.steps,
            doing=busy,
            reward_history=tuple(m["reward_mean"] for m in self.metrics),
            decode_tokens_per_s=self._rates[0],
            train_tokens_per_s=self._rates[1],
            staleness_mean=self.metrics[-1]["staleness_mean"] if self.metrics else 0.0,
            decoding=line.rollouts.decodable,
            at_environment=waiting,
            ready=ready,
            committed=len(line.admission.committed),
            groups_per_step=config.line.groups_per_step,
            seconds_left=sorted(recent)[len(recent) // 2] * left if recent else None,
        )

    @property
    def how_to_go_on(self) -> str:
        """For a run that is saved and stops."""
        path = self.folder.path
        return f"the run is saved: edit {path / CONFIG} and continue with --resume {path}"

    def save_offenders(self, error: NonFiniteError) -> Path:
        """Keep the trajectories that made numbers that are not finite."""
        found: list[Trajectory] = []
        for key in error.trajectories:
            assert isinstance(key, TrajectoryId)
            group = self.state.groups.get(key.group)
            attempt = group.attempts[key.sample] if group is not None else None
            if attempt is not None and attempt.status is not Status.FAILED:
                found.append(attempt.trajectory)
        return self.folder.save_offenders(self.state.version + 1, found, str(error))


def engine_counters(cells: Mapping[str, Cell]) -> dict[str, int]:
    """The generators' totals, over all cells."""
    total: dict[str, int] = defaultdict(int)
    for cell in cells.values():
        for name, count in cell.counters().items():
            total[name] += count
    return dict(total)


def step_metrics(
    state: RunState,
    stepped: Stepped,
    seconds: Mapping[str, float],
    time_step_s: float,
    counters: Mapping[str, int],
) -> dict[str, Any]:
    """One step's line, just before the step is applied."""
    assert state.admission is not None
    groups = [state.groups[group] for group in state.admission.committed]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    gradients = [g for c in state.contributions.values() for g in c.gradients]
    results = [sample for gradient in gradients for sample in gradient.samples]
    statistics = state.statistics(include_probe=True)
    mismatch = statistics.mismatch
    settled = {name: count - state.books_before[name] for name, count in state.ledger.to_dict().items()}
    for result in results:
        settled[result.bucket.value] += result.tokens
    tokens_generated = settled.pop("generated")
    busy = sum(seconds.values())
    trained = sum(result.tokens for result in results if result.bucket is Bucket.TRAINED)
    step = state.version + 1
    return {
        "step": step,
        "policy_version": step,
        "reward_mean": sum(rewards) / len(rewards),
        "completed_ratio": sum(t.complete for t in trajectories) / len(trajectories),
        "completion_tokens_mean": sum(a.sampled for g in groups for a in g.valid) / len(trajectories),
        "turns_mean": sum(t.turns for t in trajectories) / len(trajectories),
        "rows_split": sum(len(t.earlier) for t in trajectories),
        "zero_advantage_groups": sum(gradient.zero_advantage_groups for gradient in gradients),
        "loss": stepped.loss,
        "grad_norm": stepped.grad_norm,
        "learning_rate": stepped.learning_rate,
        "clipped_ratio": statistics.clipped_ratio,
        "clamped_ratio": statistics.clamped_ratio,
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
        "time_decode_s": seconds.get(UnitKind.DECODE, 0.0),
        "time_gradient_s": seconds.get(UnitKind.GRADIENT, 0.0)
        + seconds.get(UnitKind.SCORE, 0.0)
        + seconds.get(UnitKind.CONTRIBUTE, 0.0),
        "time_optimizer_s": seconds.get(UnitKind.OPTIMIZER_STEP, 0.0),
        "time_publish_s": seconds.get(UnitKind.PUBLISH, 0.0),
        "time_idle_s": seconds.get(WAIT, 0.0),
        "time_other_s": max(0.0, time_step_s - busy),
        "tokens_generated": tokens_generated,
        "tokens_generated_total": state.ledger.generated,
        "tokens_trained": trained,
        "effective_tokens_per_s": settled[Bucket.TRAINED] / time_step_s,
        **{f"ledger_{bucket}": count for bucket, count in settled.items()},
        **{name: count - state.counters_before[name] for name, count in state.counters.items()},
        **counters,
        "threads": stepped.threads,
        "memory_mb": resident_mb(),
    }


def token_rates(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens per second of Decode and of Gradient units in a step."""
    decode = metrics["tokens_generated"] / metrics["time_decode_s"] if metrics["time_decode_s"] else 0.0
    train = metrics["tokens_trained"] / metrics["time_gradient_s"] if metrics["time_gradient_s"] else 0.0
    return decode, train
