"""Run folders made of chosen events, for the tests of what looks at runs.

What happens is written down in the line's words (`admit`, `tokens`, `world`, `step`), and becomes the events that a
line would have recorded: `write` folds them as it goes, so what does not follow from what came before is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.measures import SampleOutcome, TokenStatistics
from headrace.runs.events import (
    SCHEMA,
    AttemptEnded,
    CheckpointWritten,
    ContributionOpened,
    ContributionReceived,
    Event,
    GradientTaken,
    GroupAdmitted,
    GroupClosed,
    GroupCommitted,
    Rebased,
    RunStarted,
    RunStopped,
    StepTaken,
    TokenRow,
    TokensDrawn,
    TurnAppended,
    TurnEnded,
    WorldAnswered,
    encode,
)
from headrace.runs.folder import RunFolder
from headrace.runs.state import RunState, Status
from headrace.schedule import Bucket
from headrace.state.journal import Journal
from headrace.state.journal_file import APPLICATION_ID
from headrace.types import TrajectoryId

Call = Callable[..., Any]
Move = Callable[[RunState], Iterator[Event]]
"""What happens next, as a frame of events. Each is applied to the state before the next one is asked for."""
Moves = Sequence[Move | tuple[str, str]]
"""Moves, or records as they stand in the journal: kind and body."""


def settings(**sections: dict[str, Any]) -> Config:
    data: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny-random"},
        "environment": {"name": "arithmetic", "max_attempts": 2},
        "algorithm": {"group_size": 2},
        "line": {"groups_per_step": 1, "steps": 3},
        "eval": {"tasks": 0},
    }
    for section, values in sections.items():
        data[section] = data.get(section, {}) | values
    return Config.from_dict(data)


def one(event: Event) -> Move:
    """This event as it is."""
    return lambda state: iter((event,))


def start(config: Config, multi_turn: bool = False) -> Move:
    def move(state: RunState) -> Iterator[Event]:
        policy = state.policy
        weights = policy.weights_id or "w0"
        resumed = state.admission is not None
        yield RunStarted(
            SCHEMA, config.to_dict(), policy.number, weights, "d0", resumed, multi_turn, 1, "these kernels"
        )

    return move


def admit(group: int, task: Any = None) -> Move:
    task = {"prompt": f"what is {group} + {group}?"} if task is None else task

    def move(state: RunState) -> Iterator[Event]:
        prompt = () if state.multi_turn else _ids(str(task.get("prompt")))
        yield GroupAdmitted(group, task, prompt, group + 1, 0)

    return move


def tokens(version: int, *rows: tuple[str, str, str | None]) -> Move:
    """Rows of (id, text, finish); the tiny model's tokens are bytes. A turn that ends is told as all of its text."""

    def move(state: RunState) -> Iterator[Event]:
        yield drawn(version, *rows)
        for name, _, finish in rows:
            if finish is not None:
                trajectory = state.attempt(_key(name)).trajectory
                said = bytes(trajectory.token_ids[trajectory.turn_start :]).decode()
                message = {"role": "assistant", "content": said} if state.multi_turn else None
                yield TurnEnded(_key(name), said, message)

    return move


def drawn(version: int, *rows: tuple[str, str, str | None], cell: str = "local") -> TokensDrawn:
    """The event of a Decode unit, for rows of (id, text, finish)."""
    sizes = [TokenRow(_key(name), len(_ids(text)), False, finish) for name, text, finish in rows]
    ids = [token for _, text, _ in rows for token in _ids(text)]
    return TokensDrawn.pack(cell, version, sizes, ids, [-0.5] * len(ids))


def world(name: str, reward: float | None, *, cut: bool = False, **more: Any) -> Move:
    """An answer, and what follows from it: the end of the attempt, or (with `done=False`) its next turn.

    `cut` says that a limit ends the episode even though the world would go on.
    """
    key = _key(name)
    answer: dict[str, Any] = {
        "error": None,
        "observation": None,
        "done": True,
        "info": {},
        "snapshot": None,
        "seconds": 0.1,
    }

    def move(state: RunState) -> Iterator[Event]:
        event = WorldAnswered(key, reward, **(answer | more))
        yield event
        assert state.config is not None
        attempt = state.attempt(key)
        if event.error is not None:
            again = key.attempt + 1 < state.config.environment.max_attempts
            yield AttemptEnded(key, None, event.error, again)
        elif event.done or cut:
            yield AttemptEnded(key, sum(attempt.trajectory.turn_rewards), None, again=False, cut=cut)
        else:
            messages = tuple((event.observation or {})["messages"])
            before = tuple(one["message"] for one in attempt.actions[-1:])
            yield TurnAppended(
                key, _ids("".join(m["content"] for m in messages)), False, "", before + messages
            )

    return move


def commit(group: int) -> Move:
    return one(GroupCommitted(group))


def close(group: int, bucket: Bucket) -> Move:
    return one(GroupClosed(group, bucket))


def step(
    number: int,
    *groups: int,
    reward: float = 0.5,
    buckets: Sequence[Bucket] = (),
    advantages: Sequence[float] = (),
    **ledger: int,
) -> Move:
    """A step over these groups, and its gradients; a group that is not in the line yet is rolled out for it.

    Args:
        buckets: of the groups' valid samples, one after another; `trained` where it ends.
        advantages: likewise; 0.5 where it ends.
        ledger: what the metrics say of each bucket.
    """
    metrics = {
        "step": number,
        "reward_mean": reward,
        "completion_tokens_mean": 4.5,
        "completed_ratio": 1.0,
        "tokens_trained": ledger.get("trained", 0),
        "staleness_mean": 0.0,
        "time_step_s": 1.25,
        "tokens_generated_total": 9 * number,
        **{f"ledger_{bucket}": ledger.get(bucket, 0) for bucket in Bucket},
    }

    def move(state: RunState) -> Iterator[Event]:
        assert state.admission is not None
        for group in groups:
            yield from _rolled_out(state, group)
            if group not in state.admission.committed:
                yield GroupCommitted(group)
        valid = [attempt for group in groups for attempt in state.groups[group].valid]
        samples = tuple(
            SampleOutcome(
                attempt.id,
                buckets[place] if place < len(buckets) else Bucket.TRAINED,
                attempt.sampled,
                advantages[place] if place < len(advantages) else 0.5,
            )
            for place, attempt in enumerate(valid)
        )
        contribution = state.next_contribution
        yield ContributionOpened(contribution, "local", 0, "these kernels")
        yield GradientTaken(
            contribution, groups, samples, 0, -0.25, float(len(samples)), 1, 1, TokenStatistics()
        )
        yield ContributionReceived(contribution, f"local/{contribution}", "its digest", 0)
        yield StepTaken(number, True, f"digest{number}", f"weights{number}", 1, metrics)

    return move


def _rolled_out(state: RunState, group: int) -> Iterator[Event]:
    """What is missing until the group is finished."""
    if group not in state.groups:
        yield from admit(group)(state)
    for attempt in state.groups[group].attempts:
        if attempt is None or attempt.ended:
            continue
        name = str(attempt.id)
        if attempt.status is Status.DECODING:
            yield from tokens(state.version, (name, "4", "stop"))(state)
        yield from world(name, 1.0)(state)


def rebased(snapshot: RunState | None = None) -> Move:
    """The run goes on from a checkpoint: of this very state, or of one whose journal is gone."""

    def move(state: RunState) -> Iterator[Event]:
        policy = (state if snapshot is None else snapshot).policy
        yield Rebased(policy.number, "d", policy.weights_id, None if snapshot is None else snapshot.to_dict())

    return move


def checkpoint(step: int) -> Move:
    return one(CheckpointWritten(step))


def stop() -> Move:
    return one(RunStopped("asked to"))


def frames(moves: Moves, state: RunState) -> Iterator[list[Event] | tuple[str, str]]:
    """Each move's events, applied to the state."""
    for move in moves:
        if isinstance(move, tuple):
            yield move
            continue
        events = []
        for event in move(state):
            state.apply(event)
            events.append(event)
        yield events


def folded(moves: Moves) -> RunState:
    """The state that these moves lead to."""
    state = RunState()
    for _ in frames(moves, state):
        pass
    return state


def record(journal: Journal, moves: Moves, state: RunState) -> list[Event]:
    """Write moves to a journal, a frame each; returns their events."""
    written: list[Event] = []
    for frame in frames(moves, state):
        journal.record(*(frame if isinstance(frame, tuple) else encode(frame)))
        journal.commit()
        written += [] if isinstance(frame, tuple) else frame
    return written


def write(path: Path, config: Config, moves: Moves, *, logs: bool = True) -> Path:
    """A run folder in which this has happened, and the logs that belong to its steps."""
    with RunFolder.create(path, config) as folder:
        journal = Journal.open(folder.journal_path)
        written = record(journal, moves, RunState())
        journal.close()
        metrics = [event.metrics for event in written if isinstance(event, StepTaken)]
        if metrics and logs:
            folder._append("metrics.jsonl", metrics)
    return path


def earlier_format(path: Path) -> None:
    """A journal as earlier versions of headrace wrote it, in place of what is there."""
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path)
    database.executescript(
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;"
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, "
        "checksum BLOB NOT NULL);"
        "INSERT INTO events VALUES (1, 0.0, 'start', '{}', zeroblob(16));"
    )
    database.close()


def _key(name: str) -> TrajectoryId:
    group, sample, attempt = map(int, name.split("."))
    return TrajectoryId(group, sample, attempt)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode(errors="surrogatepass"))


TWO_GROUPS: Moves = [
    start(settings()),
    admit(0),
    tokens(0, ("0.0.0", "4", None), ("0.1.0", "11", "stop")),
    world("0.1.0", None, error="the worker died"),
    tokens(0, ("0.0.0", "2", "stop")),
    world("0.0.0", 1.0),
    tokens(0, ("0.1.1", "fish", "length")),
    world("0.1.1", 0.0),
    commit(0),
    admit(1),
    step(1, 0, trained=6, environment_failed=2),
    tokens(1, ("1.0.0", "abc", None), ("1.1.0", "de", "stop")),
]
