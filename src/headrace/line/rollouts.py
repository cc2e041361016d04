"""Where every unfinished trajectory is worked on: at a cell, at its environment, or waiting for a cell.

Invariants
* It follows the state: what is asked of cells and environments is decided by an attempt's status alone, when the
  event that made it so is committed, and again for all attempts when a run is taken up (`take_up`).
* A trajectory is in one place at a time. Of a cell that is lost the trajectories wait for another one, with every
  token that was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from headrace.engine import random_key
from headrace.environments import Action, EnvironmentPool, WorldReply
from headrace.line.episodes import Episodes
from headrace.line.record import Record
from headrace.runs import events as happened
from headrace.runs.events import TokenRow, TokensDrawn
from headrace.runs.state import Attempt, Settled, Status
from headrace.schedule import ReturnTimes
from headrace.schedule.matching import Wanted
from headrace.schedule.units import Decode, Decoded, Request
from headrace.types import TrajectoryId

FAILURES_SHOWN = 5
"""The first failures of an environment are told one by one, …"""

FAILURES_COUNTED = 50
"""… and then one of so many, with their number. Every one is counted in the metrics."""


class Rollouts:
    """The trajectories of a line on their way.

    Attributes:
        at_environment: attempts that were handed to their environment and have no answer yet.
    """

    def __init__(
        self, record: Record, episodes: Episodes, pool: EnvironmentPool, report: Callable[[str], None]
    ) -> None:
        self.record, self.state = record, record.state
        self.episodes = episodes
        self.pool = pool
        self.report = report
        self.at_environment: set[TrajectoryId] = set()
        self._wanted: dict[TrajectoryId, Wanted] = {}
        self._cells: dict[TrajectoryId, tuple[str, int]] = {}
        self._worlds: set[TrajectoryId] = set()
        self._expected: list[tuple[tuple[int, ...], float]] = []
        self._released: list[tuple[int, ...]] = []
        self._returns = ReturnTimes()
        record.listeners.append(self._on_event)

    # Asked by the line

    @property
    def wanted(self) -> list[Wanted]:
        """Trajectories to decode that no cell has, the most urgent first."""
        return sorted(self._wanted.values(), key=lambda wanted: self._priority(wanted.id))

    @property
    def decodable(self) -> int:
        """Trajectories to decode, wherever they are."""
        return len(self._wanted) + len(self._cells)

    @property
    def at_work(self) -> bool:
        """Whether anything is decoding, or asked of an environment."""
        return bool(self._wanted or self._cells or self.at_environment)

    def unfinished(self, cell: str, incarnation: int) -> int:
        """Trajectories that a cell's incarnation was given and has not finished."""
        return sum(place == (cell, incarnation) for place in self._cells.values())

    def take_up(self) -> None:
        """Hand every unfinished attempt on to where it was, after a restart."""
        for attempt in self.state.attempts():
            self._follow(attempt)

    # Units

    def loaded(self, unit: Decode, cell: str, incarnation: int) -> Decode:
        """A Decode unit with its requests, which are the cell's from here on."""
        for key in unit.wanted:
            del self._wanted[key]
            self._cells[key] = (cell, incarnation)
        expected, self._expected = tuple(self._expected), []
        released, self._released = tuple(self._released), []
        requests = tuple(self._request(self.state.attempt(key)) for key in unit.wanted)
        return replace(unit, requests=requests, expected=expected, released=released)

    def take_decoded(self, cell: str, decoded: Decoded) -> None:
        """Record what a cell has drawn, and the turns that ended."""
        if not decoded.drawn:
            return
        rows = [TokenRow(one.id, len(one.ids), one.mixed_kv, one.finish) for one in decoded.drawn]
        drawn = TokensDrawn.pack(
            cell,
            decoded.version,
            rows,
            [i for one in decoded.drawn for i in one.ids],
            [p for one in decoded.drawn for p in one.logprobs],
        )
        self.record.emit(drawn)
        for event in self.episodes.after_tokens(drawn):
            self.record.emit(event)

    def take_replies(self, replies: Iterable[WorldReply]) -> None:
        """Record what environments have answered, and what follows from it."""
        for reply in replies:
            assert isinstance(reply.key, TrajectoryId)
            self.at_environment.discard(reply.key)
            if self.state.multi_turn and reply.error is None:
                self._returns.record(self.state.attempt(reply.key).trajectory.turns, reply.seconds)
            for event in self.episodes.after_reply(reply):
                self.record.emit(event)

    def cell_lost(self, cell: str, incarnation: int) -> None:
        """Its trajectories go on elsewhere, from what was recorded of them."""
        for key in [key for key, place in self._cells.items() if place == (cell, incarnation)]:
            del self._cells[key]
            self._follow(self.state.attempt(key))

    # Inside

    def _on_event(self, event: happened.Event, settled: Sequence[Settled]) -> None:
        match event:
            case happened.GroupAdmitted():
                group = self.state.groups.get(event.group)
                for attempt in group.attempts if group else ():
                    if attempt is not None and attempt.id.attempt == 0:
                        self._follow(attempt)
            case happened.TokensDrawn():
                for row in event.rows:
                    if row.finish is not None:
                        del self._cells[row.id]
            case happened.TurnEnded() | happened.TurnAppended():
                self._follow(self.state.attempt(event.id))
            case happened.AttemptEnded():
                self._attempt_ended(event, settled)

    def _attempt_ended(self, event: happened.AttemptEnded, settled: Sequence[Settled]) -> None:
        self.episodes.forget(event.id)
        if event.id in self._worlds:
            self._worlds.discard(event.id)
            self.pool.drop(event.id)
            ended = next((one.attempt for one in settled), None)
            attempt = ended or self.state.groups[event.id.group].attempts[event.id.sample]
            # Nobody will go on from its KV.
            if attempt is not None and attempt.id == event.id:
                self._released.append(tuple(attempt.trajectory.token_ids))
        if event.error is None:
            return
        self._tell_failure(event)
        if event.again:
            again = self.state.groups[event.id.group].attempts[event.id.sample]
            if again is not None and again.id.attempt == event.id.attempt + 1:
                self._follow(again)

    def _tell_failure(self, event: happened.AttemptEnded) -> None:
        failures = self.state.counters["environment_failures"]
        if failures <= FAILURES_SHOWN or failures % FAILURES_COUNTED == 0:
            self.report(
                f"trajectory {event.id}: the environment failed: {event.error}; "
                + ("trying again" if event.again else "no attempt is left, the sample leaves its group")
                + (f" ({failures} failures so far)" if failures >= FAILURES_SHOWN else "")
            )

    def _follow(self, attempt: Attempt) -> None:
        """Have done what the attempt's status asks for."""
        key = attempt.id
        if attempt.status is Status.DECODING and key not in self._cells:
            group = self.state.groups[key.group]
            self._wanted[key] = Wanted(key, group.admitted_version)
            if self.state.multi_turn and key not in self._worlds:
                self._resume_world(attempt)
        elif attempt.status is Status.AT_ENVIRONMENT and key not in self.at_environment:
            self.at_environment.add(key)
            self._ask(attempt)

    def _ask(self, attempt: Attempt) -> None:
        task, trajectory = self.state.groups[attempt.id.group].task, attempt.trajectory
        if not self.state.multi_turn:
            self.pool.submit(attempt.id, task, trajectory.completion)
        elif attempt.id not in self._worlds and not attempt.replies:
            self._worlds.add(attempt.id)
            self.pool.reset(attempt.id, task)
        elif attempt.id not in self._worlds:
            self._resume_world(attempt)
        else:
            self.pool.step(attempt.id, Action(**attempt.actions[-1]))
            back_in = self._returns.predict(trajectory.turns)
            if back_in is not None:
                self._expected.append((tuple(trajectory.token_ids), back_in))

    def _resume_world(self, attempt: Attempt) -> None:
        """After a restart: the episode's world, brought to where it was."""
        self._worlds.add(attempt.id)
        self.pool.resume(
            attempt.id,
            self.state.groups[attempt.id.group].task,
            [Action(**action) for action in attempt.actions],
            [WorldReply.from_dict(reply) for reply in attempt.replies],
            attempt.snapshot,
        )

    def _priority(self, key: TrajectoryId) -> tuple[int, ...]:
        """The most urgent deadline first; within one, group by group, so that groups finish and free their slots."""
        assert self.state.config is not None
        group = self.state.groups[key.group]
        return group.admitted_version + self.state.config.line.max_staleness, group.id

    def _request(self, attempt: Attempt) -> Request:
        assert self.state.config is not None
        sampling, trajectory = self.episodes.sampling, attempt.trajectory
        # What a turn may sample is fixed at its beginning, also if it is taken up in its middle.
        most = min(sampling.max_tokens, self.episodes.tokens_left(attempt) + attempt.turn_sampled)
        if most != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=most)
        row = (len(trajectory.earlier),) if trajectory.earlier else ()
        return Request(
            attempt.id,
            tuple(trajectory.token_ids),
            sampling,
            trajectory.turn_start,
            random_key(self.state.config.line.seed, *attempt.id, *row),
            self._priority(attempt.id),
            self.state.groups[attempt.id.group].admitted_version,
            self.state.multi_turn,
        )
