"""What a run did, step by step and attempt by attempt: a reader that listens to what the fold of its journal settles.

Invariants
* It holds no rule: how an attempt ended, where its tokens went and what a step consumed is what `RunState.apply` says.
* Folding a history loads no torch, no tokenizer and no tokens but those of the attempt that it was asked to keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.runs import events as happened
from headrace.runs.events import Event
from headrace.runs.state import Attempt, RunState, Settled, Status
from headrace.schedule import Bucket
from headrace.state.journal import JournalDamaged
from headrace.types import TrajectoryId

TAIL_EVENTS = 3
"""The last events whose kinds are kept: they say how a run ended (`runs/endings.py`)."""


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    """One attempt and what became of it; `bucket` is None while its tokens are in flight."""

    id: TrajectoryId
    status: Status
    tokens: int
    turns: int
    reward: float | None
    oldest_version: int | None
    finish_reason: str | None
    error: str | None
    step: int | None = None
    bucket: Bucket | None = None
    advantage: float | None = None

    @classmethod
    def of(
        cls,
        attempt: Attempt,
        step: int | None = None,
        bucket: Bucket | None = None,
        advantage: float | None = None,
    ) -> AttemptHistory:
        trajectory = attempt.trajectory
        return cls(
            attempt.id,
            attempt.status,
            attempt.sampled,
            trajectory.turns,
            trajectory.reward,
            attempt.oldest_version,
            trajectory.finish_reason,
            attempt.error,
            step,
            bucket,
            advantage,
        )


@dataclass(slots=True)
class GroupHistory:
    """A group: its task, the version it was admitted at, its deadline, and what became of it."""

    id: int
    task: dict[str, Any]
    admitted_version: int
    deadline: int
    step: int | None = None
    closed: Bucket | None = None
    ended: list[AttemptHistory] = field(default_factory=list)

    @property
    def outstanding(self) -> bool:
        return self.step is None and self.closed is None


@dataclass(frozen=True, slots=True)
class StepHistory:
    """One optimizer step; `metrics` is its line of `metrics.jsonl`, and all that is known where only that is left."""

    step: int
    at: float | None
    digest: str | None
    weights_id: str | None
    metrics: dict[str, Any]


class History:
    """A run's events, listened to. Feed them in order with `add`.

    Args:
        keep: the attempt whose turns and answers are kept.
        light: only an overview, of few kinds of events: nothing is folded, so groups and attempts are not known.

    Attributes:
        config: the settings of the last start, None before the first.
        steps, groups: by number and id.
        starts: how often the run was started, resumes included.
        settings_from: the step from which each start's settings hold.
        lost: tokens that crashes took.
        records, last: how many records the journal has, and the last event's kind and time.
        tail: the kinds of the last events.
        checkpoint: the step of the last checkpoint that was announced, None before the first.
        kept: what happened to the attempt that was to be kept, in order; a `Rebased` stands for all before it.
        running: whether a process was writing to the run when it began to be read.
        damage: where the journal is damaged, if it is.
    """

    def __init__(self, keep: TrajectoryId | None = None, *, light: bool = False) -> None:
        self.keep = keep
        self.light = light
        self.config: Config | None = None
        self.steps: dict[int, StepHistory] = {}
        self.groups: dict[int, GroupHistory] = {}
        self.starts = 0
        self.settings_from: list[int] = []
        self.lost = 0
        self.records = 0
        self.first_at: float | None = None
        self.last: tuple[str, float] | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_EVENTS)
        self.checkpoint: int | None = None
        self.kept: list[Event] = []
        self.running = False
        self.damage: JournalDamaged | None = None
        self.accounted: int | None = None if light else 0
        self._state = RunState()

    # What is known

    @property
    def attempts(self) -> dict[TrajectoryId, AttemptHistory]:
        """Every attempt, by id."""
        return {attempt.id: attempt for group in sorted(self.groups) for attempt in self.of_group(group)}

    @property
    def attempts_in_flight(self) -> Iterator[AttemptHistory]:
        """Attempts whose tokens have not ended in a bucket."""
        return (AttemptHistory.of(a) for a in self._state.attempts() if a.status is not Status.FAILED)

    def of_group(self, group: int) -> list[AttemptHistory]:
        """A group's attempts, by sample and attempt."""
        ended = self.groups[group].ended if group in self.groups else []
        flying = self._state.groups[group].attempts if group in self._state.groups else []
        return sorted([*ended, *(AttemptHistory.of(a) for a in flying if a)], key=lambda one: one.id)

    # Reading

    def add(self, seq: int, at: float, events: Iterable[Event]) -> None:
        """Take a record's events."""
        self.records = seq
        self.first_at = at if self.first_at is None else self.first_at
        for event in events:
            self.last = (event.kind, at)
            self.tail.append(event.kind)
            settled: list[Settled] = [] if self.light else self._state.apply(event)
            self._listen(event, settled, at)
        if not self.light:
            self.accounted = self._state.ledger.generated

    def _listen(self, event: Event, settled: list[Settled], at: float) -> None:
        for one in settled:
            group = self.groups[one.attempt.id.group]
            group.ended.append(AttemptHistory.of(one.attempt, one.step, one.bucket, one.advantage))
            group.step = one.step if one.step is not None else group.step
        match event:
            case happened.RunStarted():
                self._start(event)
            case happened.GroupAdmitted() if not self.light:
                admission = self._state.admission
                assert admission is not None
                deadline = admission.outstanding[event.group]
                self.groups[event.group] = GroupHistory(
                    event.group, event.task, self._state.version, deadline
                )
            case happened.GroupClosed() if not self.light:
                self.groups[event.group].closed = event.bucket
            case happened.StepTaken():
                self.steps[event.step] = StepHistory(
                    event.step, at, event.digest, event.weights_id, event.metrics
                )
            case happened.CheckpointWritten():
                self.checkpoint = event.step
            case happened.TokensLost():
                self.lost += event.tokens
            case happened.Rebased() if event.snapshot is not None and not self.light:
                self._from_snapshot(event)
            case happened.TokensDrawn():
                if self.keep is not None and any(row.id == self.keep for row in event.rows):
                    self.kept.append(event)
            case happened.TurnEnded() | happened.WorldAnswered() | happened.AttemptEnded():
                if event.id == self.keep:
                    self.kept.append(event)

    def _start(self, event: happened.RunStarted) -> None:
        self.starts += 1
        self.settings_from.append(event.number + (2 if self._state.settings_wait else 1))
        try:
            self.config = Config.from_resolved(event.config)
        except ConfigError:  # of another version of headrace
            self.config = None

    def _from_snapshot(self, event: happened.Rebased) -> None:
        """The journal goes on from a checkpoint: its groups are known from there only."""
        admission = self._state.admission
        assert admission is not None
        for group in self._state.groups.values():
            deadline = admission.outstanding[group.id]
            self.groups.setdefault(
                group.id, GroupHistory(group.id, group.task, group.admitted_version, deadline)
            )
            if any(attempt is not None and attempt.id == self.keep for attempt in group.attempts):
                self.kept = [event]
