"""What a run knows: the fold of its events. `RunState.apply` is the only thing that changes it.

Invariants
* Pure: no torch, no tokenizer, no clock, no I/O. The same events lead to the same state, live and from a journal.
* It folds the books, not the machine: weights, moments and gradient sums come about by running recorded units again,
  and are compared with what is recorded, never applied. KV, queues and measured rates are not part of it.
* The ledger balances after every event, admission's bound is kept by `schedule.Admission`, and an event that does
  not follow from those before it raises `ValueError` or `RuntimeError` before anything is settled for good.
* `apply` costs O(rows of the event). Without payloads (`TokensDrawn.payload`) only the tokens themselves are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.config import AlgorithmConfig, Config, TrainerConfig
from headrace.measures import Divergence, TokenStatistics
from headrace.runs import events as happened
from headrace.runs.agreement import Memory, remember
from headrace.schedule.admission import Admission
from headrace.schedule.ledger import Bucket, Ledger
from headrace.schedule.units import POLICY, PolicyVersion
from headrace.types import Trajectory, TrajectoryId


class Status(StrEnum):
    """Where an attempt is."""

    DECODING = "running"
    AT_ENVIRONMENT = "at environment"
    REWARDED = "rewarded"
    FAILED = "failed"


@dataclass(slots=True)
class RowSize:
    """Tokens of one row of an attempt: those before the first sampled one, and all.

    `key` is equal for equal prompts (Python's hash of whole numbers, which is no secret and the same in every process);
    `begun` says that something was sampled.
    """

    prompt: int = 0
    tokens: int = 0
    key: int = 0
    begun: bool = False


@dataclass(slots=True)
class Attempt:
    """One attempt at a sample: its books, and the trajectory itself.

    Attributes:
        sampled: tokens that the policy sampled; `turn_sampled` those of the current or last turn.
        oldest_version: of the policies that sampled it; None before the first token.
        rows: sizes of its rows, the current one last.
        trajectory: tokens, log-probs and versions, as far as the events' payloads are given.
        messages, tools: of its conversation, as rendered so far.
        actions: the policy's turns, as environments are told them: text, message, finish_reason.
        replies: the world's answers without their snapshots; `snapshot` is the last one.
    """

    id: TrajectoryId
    trajectory: Trajectory
    status: Status = Status.DECODING
    sampled: int = 0
    turn_sampled: int = 0
    oldest_version: int | None = None
    rows: list[RowSize] = field(default_factory=lambda: [RowSize()])
    error: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    snapshot: Any = None

    @property
    def ended(self) -> bool:
        return self.status in (Status.REWARDED, Status.FAILED)

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {
            "id": list(self.id),
            "trajectory": self.trajectory.to_dict(),
            "status": self.status.value,
            "rows": [[row.prompt, row.tokens, row.key, row.begun] for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Attempt:
        return cls(
            **data
            | {
                "id": TrajectoryId(*data["id"]),
                "trajectory": Trajectory.from_dict(data["trajectory"]),
                "status": Status(data["status"]),
                "rows": [RowSize(*row) for row in data["rows"]],
            }
        )


@dataclass(slots=True)
class GroupState:
    """An outstanding group. `attempts[i]` is the current attempt at sample i; None where it failed for good."""

    id: int
    task: dict[str, Any]
    prompt_ids: tuple[int, ...]
    admitted_version: int
    attempts: list[Attempt | None] = field(default_factory=list)

    @property
    def valid(self) -> list[Attempt]:
        """The attempts that have a reward."""
        return [a for a in self.attempts if a is not None and a.status is Status.REWARDED]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [attempt.trajectory for attempt in self.valid]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None]

    @property
    def finished(self) -> bool:
        """Whether every sample has a reward or has failed for good."""
        return all(attempt is None or attempt.ended for attempt in self.attempts)

    @property
    def packed_tokens(self) -> int:
        """Tokens of the group in a packed row: each distinct prompt once, and all responses."""
        rows = [row for attempt in self.valid for row in attempt.rows]
        prompts = {row.key: row.prompt for row in rows}
        return sum(prompts.values()) + sum(row.tokens - row.prompt for row in rows)


@dataclass(slots=True)
class Contribution:
    """One cell's gradient sum of the step under way: which groups, in which order, in which pieces."""

    number: int
    cell: str
    incarnation: int
    received: bool = False
    gradients: list[happened.GradientTaken] = field(default_factory=list)

    @property
    def groups(self) -> list[int]:
        return [group for gradient in self.gradients for group in gradient.groups]


class Settled(NamedTuple):
    """An attempt whose tokens have ended in a bucket, for good. `step` is the one that consumed it."""

    attempt: Attempt
    bucket: Bucket
    task: dict[str, Any]
    step: int | None = None
    advantage: float | None = None


COUNTERS = ("environment_failures", "groups_failed", "groups_replaced", "tasks_skipped")
"""Totals that metrics tell per step."""


@dataclass(slots=True)
class RunState:
    """The state of a run before its first event; `apply` takes it on.

    Attributes:
        config: the settings in force; None before the first start.
        algorithm, trainer, algorithm_file: those of the step that is under way.
        multi_turn: whether the environment is one of conversations.
        policy: the version that is trained now.
        groups: the outstanding groups by id.
        next_group, next_task: the ids of the next group and task.
        counters: the totals named in `COUNTERS`.
        failed_in_a_row: groups that the environment failed since the last usable one.
        last_failure: what the latest failed attempt said.
        pending: committed groups whose gradient is in no contribution, the oldest first.
        contributions: of the step under way, by number.
        next_contribution: the next one's number.
        probe: the comparison taken for the step under way, None before.
        memory: what earlier steps have left to judge quantised rollouts by.
        taught_nothing: steps that had no gradient.
        books_before, counters_before: ledger and counters at the beginning of the step under way.
        evaluated: the step of each held-out evaluation, by its name.
    """

    config: Config | None = None
    algorithm: AlgorithmConfig | None = None
    trainer: TrainerConfig | None = None
    algorithm_file: str | None = None
    next_algorithm_file: str | None = None
    multi_turn: bool = False
    policy: PolicyVersion = field(default_factory=lambda: PolicyVersion(POLICY, 0, ""))
    admission: Admission | None = None
    ledger: Ledger = field(default_factory=Ledger)
    groups: dict[int, GroupState] = field(default_factory=dict)
    next_group: int = 0
    next_task: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    failed_in_a_row: int = 0
    last_failure: str = ""
    pending: list[int] = field(default_factory=list)
    contributions: dict[int, Contribution] = field(default_factory=dict)
    next_contribution: int = 0
    probe: Divergence | None = None
    memory: Memory = field(default_factory=Memory)
    taught_nothing: int = 0
    books_before: dict[str, int] = field(default_factory=lambda: Ledger().to_dict())
    counters_before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    evaluated: dict[str, int] = field(default_factory=dict)

    # What others ask

    @property
    def version(self) -> int:
        return self.policy.number

    def attempt(self, key: TrajectoryId) -> Attempt:
        """The current attempt of this id.

        Raises:
            ValueError: there is none.
        """
        group = self.groups.get(key.group)
        attempt = group.attempts[key.sample] if group and key.sample < len(group.attempts) else None
        if attempt is None or attempt.id != key:
            raise ValueError(f"trajectory {key} is not in the line")
        return attempt

    def attempts(self) -> Iterator[Attempt]:
        """The current attempts of all outstanding groups."""
        return (a for group in self.groups.values() for a in group.attempts if a is not None)

    def usable(self, group: GroupState) -> bool:
        """Whether a finished group can be trained: two samples (or its only one), and more than half, are valid."""
        valid, size = len(group.valid), len(group.attempts)
        return valid >= min(2, size) and 2 * valid > size

    def in_flight(self) -> int:
        """Sampled tokens that outstanding groups hold; the ledger must agree."""
        return sum(attempt.sampled for attempt in self.attempts() if attempt.status is not Status.FAILED)

    def comparison(self) -> Divergence:
        """Trainer against generator under the same weights, over the step under way."""
        return self.statistics(include_probe=True).mismatch

    def statistics(self, include_probe: bool = False) -> TokenStatistics:
        """The sums of the step under way, over its contributions in order of their numbers."""
        total = TokenStatistics()
        for number in sorted(self.contributions):
            for gradient in self.contributions[number].gradients:
                total.merge(gradient.statistics)
        if include_probe and self.probe is not None:
            total.mismatch.merge(self.probe)
        return total

    @property
    def settings_wait(self) -> bool:
        """Whether settings that were edited hold from the next step on only: this one has gradients already."""
        return self.config is not None and (
            (self.algorithm, self.trainer) != (self.config.algorithm, self.config.trainer)
            or self.algorithm_file != self.next_algorithm_file
        )

    # The fold

    def apply(self, event: happened.Event) -> list[Settled]:
        """Take one event; returns what it has settled.

        Raises:
            ValueError, RuntimeError, KeyError, IndexError: it does not follow from those before it.
        """
        return _APPLY[event.kind](self, event) or []

    def begin(self, config: Config, multi_turn: bool, policy: PolicyVersion) -> None:
        """Start from nothing."""
        self.admission = Admission(config.line.steps, config.line.groups_per_step, config.line.max_staleness)
        self.policy = policy
        self.config, self.multi_turn = config, multi_turn
        self._take_settings()

    def _started(self, event: happened.RunStarted) -> None:
        config = Config.from_resolved(event.config)
        if self.admission is None:
            self.next_algorithm_file = event.algorithm_file
            self.begin(config, event.multi_turn, PolicyVersion(POLICY, event.number, event.weights_id))
            return
        if (event.number, event.weights_id) != self.policy[1:]:
            raise ValueError(
                f"the run starts from version {event.number}, and version {self.version} is its last"
            )
        self.config, self.multi_turn = config, event.multi_turn
        self.next_algorithm_file = event.algorithm_file
        self.admission.steps = config.line.steps
        if not any(contribution.gradients for contribution in self.contributions.values()):
            self._take_settings()

    def _take_settings(self) -> None:
        assert self.config is not None
        self.algorithm, self.trainer = self.config.algorithm, self.config.trainer
        self.algorithm_file = self.next_algorithm_file

    def _admitted(self, event: happened.GroupAdmitted) -> None:
        assert self.config is not None
        assert self.admission is not None
        if event.group != self.next_group:
            raise ValueError(f"group {event.group} is admitted, and {self.next_group} is the next one")
        self.admission.admit(event.group)
        group = GroupState(event.group, event.task, event.prompt_ids, self.version)
        self.groups[group.id] = group
        self.next_group, self.next_task = event.group + 1, event.next_task
        self.counters["tasks_skipped"] = event.skipped
        for sample in range(self.config.algorithm.group_size):
            group.attempts.append(self._begin(group, TrajectoryId(group.id, sample, 0)))

    def _begin(self, group: GroupState, key: TrajectoryId) -> Attempt:
        assert self.config is not None
        attempt = Attempt(key, Trajectory(key, self.config.sampling.temperature))
        if self.multi_turn:
            attempt.status = Status.AT_ENVIRONMENT
        else:
            self._show(attempt, group.prompt_ids)
        return attempt

    def _show(self, attempt: Attempt, ids: tuple[int, ...]) -> None:
        """Append what the policy sees next, and give it its turn."""
        row = attempt.rows[-1]
        row.tokens += len(ids)
        if not row.begun:
            row.prompt, row.key = row.tokens, hash((row.key, ids))
        attempt.status, attempt.turn_sampled = Status.DECODING, 0
        trajectory = attempt.trajectory
        trajectory.append_observed(ids)
        trajectory.finish_reason, trajectory.turn_start = None, row.tokens

    def _appended(self, event: happened.TurnAppended) -> None:
        attempt = self._at_environment(event.id)
        if event.split:
            attempt.rows.append(RowSize())
            attempt.trajectory.split((), event.reason)
        attempt.messages.extend(event.messages)
        attempt.tools.extend(event.tools)
        self._show(attempt, event.ids)

    def _drawn(self, event: happened.TokensDrawn) -> None:
        assert self.admission is not None
        ids, logprobs = event.unpack() if event.payload is not None else (None, None)
        at = 0
        for row in event.rows:
            group = self.groups.get(row.id.group)
            attempt = self.attempt(row.id)
            if attempt.status is not Status.DECODING:
                raise ValueError(f"trajectory {row.id} is {attempt.status}, and draws tokens")
            if group is None or not group.admitted_version <= event.version <= self.version:
                raise ValueError(
                    f"trajectory {row.id} may not draw under version {event.version}: version {self.version} is the "
                    f"newest, and its group was admitted at {group.admitted_version if group else None}"
                )
            attempt.sampled += row.drawn
            attempt.turn_sampled += row.drawn
            oldest = attempt.oldest_version
            attempt.oldest_version = event.version if oldest is None else min(oldest, event.version)
            attempt.rows[-1].tokens += row.drawn
            attempt.rows[-1].begun = True
            trajectory = attempt.trajectory
            trajectory.mixed_kv |= row.mixed_kv
            if ids is not None and logprobs is not None:
                end = at + row.drawn
                trajectory.extend_sampled(ids[at:end], logprobs[at:end], event.version)
                at = end
            if row.finish is not None:
                trajectory.finish_reason = row.finish
                trajectory.turns += 1
                attempt.status = Status.AT_ENVIRONMENT
        self.ledger.generate(event.tokens)

    def _said(self, event: happened.TurnEnded) -> None:
        attempt = self._at_environment(event.id)
        trajectory = attempt.trajectory
        trajectory.completion += ("\n" if trajectory.completion else "") + event.text
        if event.message is not None:
            attempt.actions.append(
                {"text": event.text, "message": event.message, "finish_reason": trajectory.finish_reason}
            )

    def _answered(self, event: happened.WorldAnswered) -> None:
        attempt = self._at_environment(event.id)
        if event.error is not None:
            return
        if attempt.trajectory.turns:
            attempt.trajectory.turn_rewards.append(event.reward or 0.0)
        if self.multi_turn:
            attempt.replies.append(
                {
                    "reward": event.reward,
                    "error": None,
                    "observation": event.observation,
                    "done": event.done,
                    "info": event.info,
                    "snapshot": None,
                    "seconds": event.seconds,
                }
            )
            attempt.snapshot = event.snapshot

    def _ended(self, event: happened.AttemptEnded) -> list[Settled]:
        attempt = self._at_environment(event.id)
        trajectory = attempt.trajectory
        attempt.snapshot = None
        if event.error is None:
            if event.reward is None:
                raise ValueError(f"trajectory {event.id} ends without a reward")
            if event.cut:
                trajectory.finish_reason = "length"
            attempt.status, trajectory.reward = Status.REWARDED, event.reward
            return []
        attempt.status, attempt.error = Status.FAILED, event.error
        self.counters["environment_failures"] += 1
        self.last_failure = event.error
        self.ledger.settle(Bucket.ENVIRONMENT_FAILED, attempt.sampled)
        group = self.groups[event.id.group]
        again = self._begin(group, event.id._replace(attempt=event.id.attempt + 1)) if event.again else None
        group.attempts[event.id.sample] = again
        return [Settled(attempt, Bucket.ENVIRONMENT_FAILED, group.task)]

    def _closed(self, event: happened.GroupClosed) -> list[Settled]:
        assert self.admission is not None
        group = self.groups[event.group]
        if not group.finished:
            raise ValueError(f"group {event.group} is not finished")
        self.admission.close(event.group)
        del self.groups[event.group]
        if event.bucket is Bucket.ENVIRONMENT_FAILED:
            self.counters["groups_failed"] += 1
            self.failed_in_a_row += 1
        else:
            self.counters["groups_replaced"] += 1
        self.ledger.settle(event.bucket, sum(attempt.sampled for attempt in group.valid))
        return [Settled(attempt, event.bucket, group.task) for attempt in group.valid]

    def _committed(self, event: happened.GroupCommitted) -> None:
        assert self.admission is not None
        if not self.groups[event.group].finished:
            raise ValueError(f"group {event.group} is not finished")
        self.admission.commit(event.group)
        self.failed_in_a_row = 0
        self.pending.append(event.group)

    def _opened(self, event: happened.ContributionOpened) -> None:
        if event.number != self.next_contribution:
            raise ValueError(
                f"contribution {event.number} is opened, and {self.next_contribution} is the next one"
            )
        self.next_contribution += 1
        self.contributions[event.number] = Contribution(event.number, event.cell, event.incarnation)

    def _gradient(self, event: happened.GradientTaken) -> None:
        contribution = self.contributions[event.contribution]
        if contribution.received:
            raise ValueError(
                f"contribution {event.contribution} was received, and nothing can be added to it"
            )
        if not set(event.groups) <= set(self.pending):
            raise ValueError(f"groups {event.groups} are not all waiting for a gradient")
        contribution.gradients.append(event)
        self.pending = [group for group in self.pending if group not in event.groups]

    def _received(self, event: happened.ContributionReceived) -> None:
        self.contributions[event.number].received = True

    def _gone(self, event: happened.ContributionLost) -> None:
        contribution = self.contributions[event.number]
        if contribution.received:
            raise ValueError(f"contribution {event.number} was received, and cannot be lost")
        assert self.admission is not None
        del self.contributions[event.number]
        back = {*contribution.groups, *self.pending}
        self.pending = [group for group in self.admission.committed if group in back]

    def _probed(self, event: happened.AgreementProbed) -> None:
        self.probe = event.divergence

    def _stepped(self, event: happened.StepTaken) -> list[Settled]:
        assert self.config is not None
        assert self.admission is not None
        if event.step != self.version + 1:
            raise ValueError(f"step {event.step} follows {self.version}")
        live = [self.contributions[number] for number in sorted(self.contributions)]
        if self.pending or not all(contribution.received for contribution in live):
            raise ValueError(f"step {event.step} lacks gradients")
        results = {
            result.id: result for contribution in live for g in contribution.gradients for result in g.samples
        }
        self.memory = remember(self.memory, self.comparison(), self.config.line.mismatch_ess_limit)
        settled = []
        for group_id in self.admission.complete_step():
            group = self.groups.pop(group_id)
            for attempt in group.valid:
                result = results.pop(attempt.id)
                if result.tokens != attempt.sampled:
                    raise ValueError(
                        f"trajectory {attempt.id} has {attempt.sampled} tokens, not {result.tokens}"
                    )
                self.ledger.settle(result.bucket, attempt.sampled)
                settled.append(Settled(attempt, result.bucket, group.task, event.step, result.advantage))
        self.ledger.check(self.in_flight())
        self.policy = PolicyVersion(POLICY, event.step, event.weights_id)
        self.taught_nothing += not event.updated
        self.contributions, self.probe = {}, None
        self.books_before, self.counters_before = self.ledger.to_dict(), dict(self.counters)
        self._take_settings()
        return settled

    def _rebased(self, event: happened.Rebased) -> None:
        if event.snapshot is not None:
            self.load(event.snapshot)
        if event.step != self.version:
            raise ValueError(f"the run goes on from step {event.step}, and {self.version} is its last")
        self.policy = self.policy._replace(weights_id=event.weights_id)

    def _lost(self, event: happened.TokensLost) -> None:
        self.ledger.generate(event.tokens)
        self.ledger.settle(Bucket.LOST, event.tokens)

    def _evaluated(self, event: happened.EvaluationTaken) -> None:
        self.evaluated[event.name] = event.step

    def _for_readers(self, event: happened.Event) -> None:
        """Nothing that is to be decided depends on it."""

    def _at_environment(self, key: TrajectoryId) -> Attempt:
        attempt = self.attempt(key)
        if attempt.status is not Status.AT_ENVIRONMENT:
            raise ValueError(f"trajectory {key} is {attempt.status}, and not at its environment")
        return attempt

    # Snapshots

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return data | {
            "config": None if self.config is None else self.config.to_dict(),
            "algorithm": None if self.algorithm is None else self.algorithm.model_dump(mode="json"),
            "trainer": None if self.trainer is None else self.trainer.model_dump(mode="json"),
            "policy": list(self.policy),
            "admission": None if self.admission is None else self.admission.state_dict(),
            "ledger": self.ledger.to_dict(),
            "groups": [
                {
                    "id": group.id,
                    "task": group.task,
                    "prompt_ids": list(group.prompt_ids),
                    "admitted_version": group.admitted_version,
                    "attempts": [None if a is None else a.to_dict() for a in group.attempts],
                }
                for group in self.groups.values()
            ],
            "contributions": [
                [c.number, c.cell, c.incarnation, c.received, happened.encode(c.gradients)[1]]
                for c in self.contributions.values()
            ],
            "probe": None if self.probe is None else self.probe.to_dict(),
            "memory": self.memory.to_dict(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Become what `to_dict` wrote.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        plain = {name: data[name] for name in self.__slots__}
        groups = {
            group["id"]: GroupState(
                group["id"],
                group["task"],
                tuple(group["prompt_ids"]),
                group["admitted_version"],
                [None if a is None else Attempt.from_dict(a) for a in group["attempts"]],
            )
            for group in data["groups"]
        }
        contributions = {
            number: Contribution(number, cell, incarnation, received, list(happened.decode(gradients)))  # type: ignore[arg-type]
            for number, cell, incarnation, received, gradients in data["contributions"]
        }
        plain |= {
            "config": None if data["config"] is None else Config.from_resolved(data["config"]),
            "algorithm": None
            if data["algorithm"] is None
            else AlgorithmConfig.model_validate(data["algorithm"]),
            "trainer": None if data["trainer"] is None else TrainerConfig.model_validate(data["trainer"]),
            "policy": PolicyVersion(*data["policy"]),
            "admission": None if data["admission"] is None else Admission.from_state(data["admission"]),
            "ledger": Ledger.from_dict(data["ledger"]),
            "groups": groups,
            "contributions": contributions,
            "probe": None if data["probe"] is None else Divergence.from_dict(data["probe"]),
            "memory": Memory.from_dict(data["memory"]),
        }
        for name, value in plain.items():
            setattr(self, name, value)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunState:
        state = cls()
        state.load(data)
        return state


_APPLY: dict[str, Any] = {
    "start": RunState._started,
    "admit": RunState._admitted,
    "turn": RunState._appended,
    "tokens": RunState._drawn,
    "said": RunState._said,
    "world": RunState._answered,
    "ended": RunState._ended,
    "close": RunState._closed,
    "commit": RunState._committed,
    "opened": RunState._opened,
    "gradient": RunState._gradient,
    "received": RunState._received,
    "gone": RunState._gone,
    "probe": RunState._probed,
    "step": RunState._stepped,
    "publish": RunState._for_readers,
    "cell_lost": RunState._for_readers,
    "base": RunState._rebased,
    "lost": RunState._lost,
    "evaluation": RunState._evaluated,
    "checkpoint": RunState._for_readers,
    "stop": RunState._for_readers,
}
