"""The loop of a running line.

Each turn: take what environments and cells have answered as events; commit them, which takes them to the journal, to
the state and to whoever listens; then plan the next units of work and hand them to the cells.

Invariants
* No token is trained above `line.max_staleness` (`schedule/admission.py`), also after a resume.
* A step is on record before any cell draws under its version: only `Publish`, planned from the state, lets one.
* Every wait has a name and a deadline; a line that nothing can move any more ends with an error at once.
* A line can go on from each of its checkpoints and from each frame of its journal (`line/resume.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.environments import EnvironmentPool
from headrace.errors import EnvironmentFailure, LineStuckError, NonFiniteError, RunError
from headrace.line.account import WAIT, Account
from headrace.line.cell import Cell
from headrace.line.counts import Counts
from headrace.line.intake import Intake
from headrace.line.loading import Loader
from headrace.line.observer import Observer
from headrace.line.record import Record
from headrace.line.rollouts import Rollouts
from headrace.runs import events as happened
from headrace.runs.agreement import disagreement_problem, quantised_problem
from headrace.runs.state import GroupState
from headrace.schedule import Assignments, Bucket, DecodeCost, plan, worth_starting
from headrace.schedule.units import (
    CellView,
    Contribute,
    Contributed,
    Decoded,
    Died,
    Gradient,
    GradientDone,
    OptimizerStep,
    Outcome,
    Scored,
    Stepped,
    Taken,
    Unit,
)

REPORT_WAIT_S = 10.0
"""A wait says what it waits for this often."""

PROMPT_ANSWER_S = 0.05
"""An environment that answers within this is waited for rather than run ahead of: that would only cost staleness."""

REPLACED_LIMIT = 10
"""With `zero_advantage = "replace"`, at most this many times B groups are replaced in one step; further ones count."""


class ProductionLine:
    """Generator, environment and trainer in one loop over any number of cells.

    Args:
        record: the account of the run so far.
        cells: by name.
        save: writes a checkpoint.
        stopping: asked between units; true ends the loop.
    """

    def __init__(
        self,
        record: Record,
        cells: dict[str, Cell],
        rollouts: Rollouts,
        intake: Intake,
        loader: Loader,
        account: Account,
        pool: EnvironmentPool,
        observer: Observer,
        save: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.record, self.state = record, record.state
        self.cells = cells
        self.rollouts, self.intake, self.loader, self.account = rollouts, intake, loader, account
        self.pool, self.observer = pool, observer
        self.save, self.stopping = save, stopping
        self.assignments = Assignments()
        self._incarnations = {name: cell.view.incarnation for name, cell in cells.items()}
        self.decode_cost = DecodeCost()
        assert self.state.config is not None
        assert self.state.admission is not None
        self.config, self.admission = self.state.config, self.state.admission

    def run(self) -> bool:
        """Run to the last step; False if it was asked to stop before."""
        while not self.state.admission.finished:  # type: ignore[union-attr]
            if self.stopping():
                return False
            self.turn()
        return True

    def turn(self) -> None:
        """Everything between two rounds of units, and one round."""
        self.take_replies()
        self.settle_groups()
        self.admit()
        self.notice_deaths()
        self.record.commit()
        views = self.views()
        planned = plan(self.counts(), views)
        self.observer.on_status(self.account.status(self, [unit for _, unit in planned]))
        for view, unit in planned:
            self.start(view, unit)
        if self.assignments:
            for outcome in self.outcomes():
                self.take(outcome)
        else:
            self.wait_for_environment()
        self.record.commit()

    # Groups

    def take_replies(self) -> None:
        """Take what environments have answered; idle cells wait a moment for what is about to come."""
        self.rollouts.take_replies(self.pool.poll())
        for report in self.pool.take_reports():
            self.observer.on_message(report)
        self.record.commit()
        while self.rollouts.at_environment and not self.rollouts.decodable and not self.state.pending:
            if self.assignments:
                return
            with self.account.booked(WAIT):
                replies = self.pool.wait(PROMPT_ANSWER_S)
            if not replies:
                return
            self.rollouts.take_replies(replies)
            self.record.commit()

    def settle_groups(self) -> None:
        """Close groups that cannot be used, commit those that can as far as the deadlines allow."""
        ready = []
        for group in list(self.state.groups.values()):
            if group.id in self.admission.committed or not group.finished:
                continue
            if not self.state.usable(group):
                self._close_failed(group)
            elif self._replaceable(group):
                self.record.emit(happened.GroupClosed(group.id, Bucket.ZERO_ADVANTAGE))
            else:
                ready.append(group.id)
        while (group_id := self.admission.next_commit(ready)) is not None:
            self.record.emit(happened.GroupCommitted(group_id))

    def _close_failed(self, group: GroupState) -> None:
        self.record.emit(happened.GroupClosed(group.id, Bucket.ENVIRONMENT_FAILED))
        self.observer.on_message(
            f"group {group.id} is closed: the environment failed too many of its samples"
        )
        limit = 2 * self.admission.groups_per_step
        if self.state.failed_in_a_row >= limit:
            self.record.commit()
            raise EnvironmentFailure(
                f"the environment failed {limit} groups in a row; the last failure: {self.state.last_failure}"
            )

    def _replaceable(self, group: GroupState) -> bool:
        replaced = self.state.counters["groups_replaced"] - self.state.counters_before["groups_replaced"]
        return replaced < REPLACED_LIMIT * self.admission.groups_per_step and self.loader.replaceable(group)

    def admit(self) -> None:
        """Start groups while the bound allows it, the environment has places and the line gains by it."""
        while self.admission.can_admit() and self._has_places() and self._worth_starting():
            self.record.emit(self.intake.next(self.state))
            self.record.commit()

    def _has_places(self) -> bool:
        """Whether the environment can begin all episodes of another group; the first group waits for its places."""
        free = self.pool.free_places
        return free is None or free >= self.config.algorithm.group_size or not self.rollouts.at_work

    def _worth_starting(self) -> bool:
        committed = len(self.admission.committed)
        return worth_starting(
            groups_per_step=self.admission.groups_per_step,
            committed=committed,
            uncommitted=len(self.admission.outstanding) - committed,
            decodable=self.rollouts.decodable,
            cost=self.decode_cost,
        )

    # Units

    def views(self) -> list[CellView]:
        """What each cell holds, and what it was told to run."""
        views = []
        for name, cell in self.cells.items():
            view = cell.view
            busy = tuple(
                a.unit.kind for a in self.assignments if (a.cell, a.incarnation) == (name, view.incarnation)
            )
            unfinished = self.rollouts.unfinished(name, view.incarnation)
            views.append(replace(view, busy=busy, unfinished=unfinished))
        return views

    def counts(self) -> Counts:
        """What the planner reads."""
        return Counts.of(
            self.state, self.config, self.rollouts.wanted, self.assignments, self.loader.whole_batch
        )

    def start(self, view: CellView, unit: Unit) -> None:
        """Hand a unit to a cell, with all that it needs."""
        if isinstance(unit, Gradient) and unit.contribution is None:
            number = self.state.next_contribution
            self.record.emit(
                happened.ContributionOpened(number, view.name, view.incarnation, self.loader.fingerprint)
            )
            self.record.commit()
            unit = replace(unit, contribution=number)
        if isinstance(unit, OptimizerStep):
            self._check_agreement()
        assignment = self.assignments.open(
            view.name, view.incarnation, self.loader.loaded(unit, view, self.rollouts)
        )
        self.cells[view.name].start(assignment)

    def outcomes(self) -> list[Outcome]:
        """What cells have answered: of all of them, once one has."""
        deadline = time.monotonic() + self.config.line.wait_timeout_s
        while True:
            outcomes = [outcome for cell in self.cells.values() for outcome in self._heard(cell)]
            if outcomes:
                return outcomes
            if time.monotonic() >= deadline:
                waiting = ", ".join(f"{a.unit.kind} on {a.cell}" for a in self.assignments)
                raise LineStuckError(
                    f"waited {self.config.line.wait_timeout_s:g} s (line.wait_timeout_s) for cells: {waiting}"
                )

    def _heard(self, cell: Cell) -> Sequence[Outcome]:
        try:
            return cell.wait(PROMPT_ANSWER_S / max(1, len(self.cells)))
        except NonFiniteError as error:
            path = self.account.save_offenders(error)
            raise NonFiniteError(f"{error}; the trajectories that caused it are in {path}") from error

    def take(self, outcome: Outcome) -> None:
        """Record what came of a unit."""
        assignment = self.assignments.take(outcome)
        if assignment is None:
            return
        self.account.seconds[assignment.unit.kind] += outcome.seconds
        match outcome.result:
            case Decoded() as decoded:
                for sequences, seconds in decoded.timed:
                    self.decode_cost.add(sequences, seconds)
                self.rollouts.take_decoded(outcome.cell, decoded)
            case GradientDone() as done:
                assert isinstance(assignment.unit, Gradient)
                self.record.emit(gradient_taken(assignment.unit, done))
            case Scored(divergence):
                self.record.emit(happened.AgreementProbed(divergence))
            case Contributed(handle):
                assert isinstance(assignment.unit, Contribute)
                self.record.emit(happened.ContributionReceived(assignment.unit.contribution, *handle))
            case Stepped() as stepped:
                self.take_step(stepped)
            case Taken(number):
                self.record.emit(happened.Published(outcome.cell, number))
            case Died(reason, drawn):
                if drawn:
                    self.record.emit(happened.TokensLost(drawn))
                self.cell_lost(outcome.cell, outcome.incarnation, reason)

    def take_step(self, stepped: Stepped) -> None:
        """A step's weights are there: they count once they are on record."""
        metrics = self.account.close_step(self.state, stepped, self.cells)
        self.record.emit(
            happened.StepTaken(
                metrics["step"],
                stepped.updated,
                stepped.digest,
                stepped.weights_id,
                stepped.threads,
                metrics,
            )
        )
        self.record.commit()
        every = self.config.line.checkpoint_every
        if every and self.state.version % every == 0 and not self.admission.finished:
            self.save()

    def notice_deaths(self) -> None:
        """A cell that is there in another incarnation has lost what the one before held."""
        for name, cell in self.cells.items():
            known, there = self._incarnations[name], cell.view.incarnation
            if known != there:
                self._incarnations[name] = there
                self.cell_lost(name, known, "it came back under another incarnation")

    def cell_lost(self, name: str, incarnation: int, reason: str) -> None:
        """An incarnation is gone: what it held goes on elsewhere, and its gradients are taken again."""
        self.record.emit(happened.CellLost(name, incarnation, reason))
        self.assignments.close_cell(name, incarnation)
        for contribution in list(self.state.contributions.values()):
            here = (contribution.cell, contribution.incarnation) == (name, incarnation)
            if here and not contribution.received:
                self.record.emit(happened.ContributionLost(contribution.number, reason))
        self.rollouts.cell_lost(name, incarnation)

    def _check_agreement(self) -> None:
        """Stop the run where rollouts are not the policy's any more, with its state saved."""
        line, step = self.config.line, self.state.comparison()
        problem = (
            disagreement_problem(step, line.logprob_diff_limit)
            if self.config.engine.weight_format == "float32"
            else quantised_problem(self.state.memory, step, line.mismatch_ess_limit)
        )
        if problem is not None:
            self.save()
            raise RunError(f"step {self.state.version + 1}: {problem}; {self.account.how_to_go_on}")

    # Waiting

    def wait_for_environment(self) -> None:
        """Wait for an environment, by name and with a deadline."""
        waited_for = self.admission.waited_for()
        count = len(self.rollouts.at_environment)
        what = f"the rewards of {count} trajectories (groups {waited_for} are due first)"
        if not count:
            raise LineStuckError(
                f"the line is stuck: nothing runs, and nothing is asked that could bring {what}"
            )
        limit = self.config.line.wait_timeout_s
        with self.account.booked(WAIT):
            started = time.monotonic()
            while True:
                waited = time.monotonic() - started
                replies = self.pool.wait(min(REPORT_WAIT_S, max(0.0, limit - waited)))
                self.rollouts.take_replies(replies)
                if replies or self.stopping():
                    return
                waited = time.monotonic() - started
                if waited >= limit:
                    raise LineStuckError(f"waited {waited:.0f} s (line.wait_timeout_s) for {what}")
                self.observer.on_message(f"waiting on {what} for {waited:.0f} s of at most {limit:.0f}")


def gradient_taken(unit: Gradient, done: GradientDone) -> happened.GradientTaken:
    """A Gradient unit's outcome as an event."""
    result = done.result
    assert unit.contribution is not None
    return happened.GradientTaken(
        unit.contribution,
        unit.groups,
        tuple(result.samples),
        result.zero_advantage_groups,
        result.loss_sum,
        result.denominator,
        result.micro_batches,
        done.threads,
        result.statistics,
    )
