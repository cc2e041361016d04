"""What a run did, folded from its journal's events: steps, groups and every attempt, also while the run goes on.

Invariant: nothing is guessed while it can still turn out otherwise: how an attempt ended that the journal does not say
in so many words (a full context ends an episode, too) is told once its group has left the line.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.config import Config
from headrace.environments import episode_reward
from headrace.errors import ConfigError, EnvironmentSetupError
from headrace.schedule import Bucket
from headrace.state.journal import Event, JournalDamaged
from headrace.types import TrajectoryId

TAIL_EVENTS = 3
"""The last events that are kept whole: they say how a run ended (`line/endings.py`)."""


class Status(StrEnum):
    """Where an attempt is."""

    RUNNING = "running"
    AT_ENVIRONMENT = "at environment"
    REWARDED = "rewarded"
    FAILED = "failed"


@dataclass(slots=True)
class Turn:
    """One turn of the policy, and what the world answered.

    Attributes:
        ids: sampled token ids; empty unless the history was asked to keep them.
        finish_reason: "stop" or "length" once the turn has ended.
        reply: the body of the `world` event that answered it.
    """

    ids: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str | None = None
    reply: dict[str, Any] | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt at a sample, from its first token to what became of it.

    Attributes:
        tokens: sampled so far.
        turns: turns that the policy has ended.
        reward: the sum of what its turns earned, once it has ended.
        oldest_version: of the policies that sampled it; None before the first token.
        step: the step that consumed it.
        bucket: where its tokens ended in the ledger; None while it is in flight.
        error: what the environment said, of a failed attempt.
        conversation, opening: its turns and the world's first reply, if they were asked to be kept.
    """

    id: TrajectoryId
    status: Status = Status.RUNNING
    tokens: int = 0
    turns: int = 0
    earned: float = 0.0
    reward: float | None = None
    oldest_version: int | None = None
    finish_reason: str | None = None
    answered: bool = False
    """Whether the world has answered its last turn."""
    step: int | None = None
    bucket: Bucket | None = None
    error: str | None = None
    opening: dict[str, Any] | None = None
    conversation: list[Turn] = field(default_factory=list)


@dataclass(slots=True)
class GroupHistory:
    """A group: its task, the version it was admitted at, and what became of it."""

    id: int
    task: dict[str, Any] | None = None
    admitted_version: int | None = None
    deadline: int | None = None
    step: int | None = None
    closed: Bucket | None = None

    @property
    def outstanding(self) -> bool:
        return self.step is None and self.closed is None


@dataclass(frozen=True, slots=True)
class StepHistory:
    """One optimizer step; `metrics` is its line of `metrics.jsonl`, and all that is known where only that is left."""

    step: int
    at: float | None
    groups: tuple[int, ...]
    digest: str | None
    weights_id: str | None
    metrics: dict[str, Any]


class History:
    """A journal's events, folded. Feed them in order with `add`.

    Args:
        keep: the attempt whose tokens and replies are kept.

    Attributes:
        config: the settings of the last start, None before the first.
        steps, groups, attempts: by number, id and id.
        starts: how often the run was started, resumes included.
        lost: tokens that crashes took.
        events, last: how many events there are, and the last one's kind and time.
        tail: the last events, whole.
        accounted: tokens sampled, as far as the journal tells; None where it does not: it is not whole, or was
            read `light`.
        running: whether a process was writing to the run when it began to be read.
        damage: where the journal is damaged, if it is.
    """

    def __init__(self, keep: TrajectoryId | None = None) -> None:
        self.keep = keep
        self.config: Config | None = None
        self.steps: dict[int, StepHistory] = {}
        self.groups: dict[int, GroupHistory] = {}
        self.attempts: dict[TrajectoryId, Attempt] = {}
        self.starts = 0
        self.lost = 0
        self.events = 0
        self.first_at: float | None = None
        self.last: tuple[str, float] | None = None
        self.tail: deque[Event] = deque(maxlen=TAIL_EVENTS)
        self.accounted: int | None = 0
        self.running = False
        self.damage: JournalDamaged | None = None

    @property
    def attempts_in_flight(self) -> Iterator[Attempt]:
        """Attempts whose tokens have not ended in a bucket."""
        return (attempt for attempt in self.attempts.values() if attempt.bucket is None)

    def of_group(self, group: int) -> list[Attempt]:
        """A group's attempts, by sample and attempt."""
        return [self.attempts[key] for key in sorted(self.attempts) if key.group == group]

    def add(self, event: Event) -> None:
        """Take the next event. Kinds that are not known are counted and no more."""
        self.events = event.seq
        self.first_at = event.at if self.first_at is None else self.first_at
        self.last = (event.kind, event.at)
        self.tail.append(event)
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event)

    # Events

    def _on_start(self, event: Event) -> None:
        self.starts += 1
        try:
            self.config = Config.from_dict(event.body["config"])
        except ConfigError:  # of another version of headrace
            self.config = None

    def _on_admit(self, event: Event) -> None:
        body = event.body
        group = self._group(body["group"])
        group.task, group.admitted_version, group.deadline = body["task"], body["version"], body["deadline"]
        for sample in range(self.config.algorithm.group_size if self.config else 0):
            self._attempt([group.id, sample, 0])

    def _on_tokens(self, event: Event) -> None:
        version = event.body["version"]
        self._account(sum(len(row["ids"]) for row in event.body["rows"]))
        for row in event.body["rows"]:
            attempt = self._attempt(row["id"])
            attempt.status = Status.RUNNING
            attempt.tokens += len(row["ids"])
            attempt.oldest_version = (
                version if attempt.oldest_version is None else min(version, attempt.oldest_version)
            )
            kept = attempt.id == self.keep
            if kept and (not attempt.conversation or attempt.conversation[-1].finish_reason is not None):
                attempt.conversation.append(Turn())
            if kept:
                attempt.conversation[-1].ids.extend(row["ids"])
                attempt.conversation[-1].finish_reason = row["finish"]
            if row["finish"] is not None:
                attempt.turns += 1
                attempt.finish_reason = row["finish"]
                attempt.status, attempt.answered = Status.AT_ENVIRONMENT, False

    def _on_world(self, event: Event) -> None:
        body = event.body
        attempt = self._attempt(body["id"])
        if attempt.id == self.keep:
            if attempt.conversation:
                attempt.conversation[-1].reply = body
            else:
                attempt.opening = body
        if body.get("error") is not None:
            self._fail(attempt, body["error"])
        elif not attempt.turns:
            attempt.status = Status.RUNNING
        else:
            attempt.answered = True
            attempt.earned += body["reward"] or 0.0
            if body.get("done", True) or self._at_limit(attempt):
                self._reward(attempt)
            else:
                attempt.status = Status.RUNNING

    def _on_commit(self, event: Event) -> None:
        self._finish_group(event.body["group"])

    def _on_close(self, event: Event) -> None:
        group = self._group(event.body["group"])
        group.closed = Bucket(event.body["bucket"])
        for attempt in self._finish_group(group.id):
            attempt.bucket = attempt.bucket or group.closed

    def _on_step(self, event: Event) -> None:
        body = event.body
        groups = tuple(body["groups"])
        self.steps[body["step"]] = StepHistory(
            body["step"], event.at, groups, body["digest"], body["weights_id"], body.get("metrics") or {}
        )
        # Right also where an earlier part of the journal is gone.
        self.accounted = self.steps[body["step"]].metrics.get("tokens_generated_total", self.accounted)
        for group_id in groups:
            self._group(group_id).step = body["step"]
            finished = self._finish_group(group_id)
            rewards = {attempt.reward for attempt in finished if attempt.status is Status.REWARDED}
            for attempt in finished:
                if attempt.status is Status.REWARDED:
                    attempt.step, attempt.bucket = body["step"], self._trained(attempt, len(rewards) > 1)

    def _on_lost(self, event: Event) -> None:
        self.lost += event.body["tokens"]
        self._account(event.body["tokens"])

    def _on_base(self, event: Event) -> None:
        if not event.body["whole"]:  # a checkpoint stands for what is not in this journal
            self.accounted = None

    # Inside

    def _account(self, tokens: int) -> None:
        if self.accounted is not None:
            self.accounted += tokens

    def _group(self, group_id: int) -> GroupHistory:
        # A group that was admitted before this journal began has no task here.
        return self.groups.setdefault(group_id, GroupHistory(group_id))

    def _attempt(self, values: Sequence[int]) -> Attempt:
        key = TrajectoryId(*values)
        attempt = self.attempts.get(key)
        if attempt is None:
            self._group(key.group)
            attempt = self.attempts[key] = Attempt(key)
            before = self.attempts.get(key._replace(attempt=key.attempt - 1))
            if before is not None and before.bucket is None:
                self._fail(before, before.error or "it could not go on")
        return attempt

    def _at_limit(self, attempt: Attempt) -> bool:
        """Whether a limit of the settings ends the episode here."""
        limits: Any = self.config.environment if self.config else None
        turns, tokens = getattr(limits, "max_turns", None), getattr(limits, "max_episode_tokens", None)
        return (turns is not None and attempt.turns >= turns) or (
            tokens is not None and attempt.tokens >= tokens
        )

    def _reward(self, attempt: Attempt) -> None:
        try:
            attempt.reward = episode_reward((attempt.earned,))
        except EnvironmentSetupError as error:
            self._fail(attempt, str(error))
        else:
            attempt.status = Status.REWARDED

    def _fail(self, attempt: Attempt, error: str) -> None:
        attempt.status, attempt.error = Status.FAILED, error
        attempt.bucket = Bucket.ENVIRONMENT_FAILED
        again = attempt.id.attempt + 1
        if self.config is not None and again < self.config.environment.max_attempts:
            self.attempts.setdefault(key := attempt.id._replace(attempt=again), Attempt(key))

    def _finish_group(self, group_id: int) -> list[Attempt]:
        """Decide about attempts whose end the journal does not tell: all of a group that is finished have ended."""
        attempts = self.of_group(group_id)
        for attempt in attempts:
            if attempt.status in (Status.REWARDED, Status.FAILED):
                continue
            if attempt.answered:
                attempt.finish_reason = "length"
                self._reward(attempt)
            else:
                attempt.status, attempt.bucket = Status.FAILED, Bucket.ENVIRONMENT_FAILED
        return attempts

    def _trained(self, attempt: Attempt, differ: bool) -> Bucket:
        """Where the trainer puts the tokens of a consumed attempt."""
        algorithm = self.config.algorithm if self.config else None
        if algorithm is not None and algorithm.mask_truncated and attempt.finish_reason != "stop":
            return Bucket.MASKED
        trained = differ or (algorithm is not None and algorithm.kl_coef > 0)
        return Bucket.TRAINED if trained else Bucket.ZERO_ADVANTAGE
