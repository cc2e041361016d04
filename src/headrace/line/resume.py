"""How a line goes on: the last checkpoint, then its journal, then the units of it run again.

Invariants
* A live line and its journal lead to the same state: both are folds of the same events.
* What a resume refuses is refused before any log is cut.
* Settings that the saved trajectories were made under stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.config import Config, SamplingConfig
from headrace.errors import RunError, UserError
from headrace.line.account import Account
from headrace.line.cell import LocalCell
from headrace.line.record import Record
from headrace.line.retake import Retake
from headrace.runs import events as happened
from headrace.runs.events import decode
from headrace.runs.folder import RunFolder
from headrace.runs.state import RunState
from headrace.state.journal import BEGINNING, Journal, Mark, Stored
from headrace.trainer import load_checkpoint

KEPT_SETTINGS = {
    "model": ("dtype",),
    "environment": ("max_attempts", "max_turns", "max_episode_tokens"),
    "sampling": tuple(SamplingConfig.model_fields),
    "algorithm": ("group_size",),
    "engine": ("context_length", "weight_format"),
    "line": ("groups_per_step", "max_staleness", "seed"),
}
"""Settings that a run keeps to its end: they say what a trajectory is, and unfinished ones are carried over."""


@dataclass(slots=True)
class Resumed:
    """How a resume went.

    Attributes:
        changed: steps whose weights came out with other bits.
        whole: whether the journal holds what led to the checkpoint.
    """

    changed: list[int]
    whole: bool


def restore(
    record: Record, config: Config, cell: LocalCell, module: Any, folder: RunFolder, account: Account
) -> Resumed:
    """Bring state and cell to where the run was.

    Raises:
        UserError: the settings are not those that the run was saved under.
        RunError: what the run went on from is gone, or the journal contradicts itself.
    """
    state, report = record.state, account.observer.on_message
    assert record.journal is not None
    step = folder.latest_checkpoint()
    saved: dict[str, Any] = {}
    mark = BEGINNING
    if step is not None:
        path = folder.checkpoint_path(step)
        saved = cell.load(lambda trainer: load_checkpoint(path, module, trainer))
        if not {"state", "journal", "account"} <= saved.keys():
            raise UserError(
                f"{path} was written by an earlier version of headrace, whose runs cannot be taken up; begin a new run "
                f"with model.name = {str(path)!r}"
            )
        state.load(saved["state"])
        assert state.config is not None
        refuse_changed(state.config.to_dict(), config)
        mark = Mark(*saved["journal"])
    whole = record.journal.holds(mark)
    if whole:
        _check_rest(record.journal, mark, state, config)
    elif step is not None:
        _check_steps(_started(state), state.version, config)
    # Only now is anything cut: what is refused stays as it is.
    for name, last in folder.rewind(step or 0).items():
        if last < (step or 0):
            report(f"{name} ends at step {last}: its lines up to step {step} are missing, and stay so")
    account.metrics = folder.metrics()
    retake = Retake(state, cell, folder.path)
    if step is not None:
        cell.policy = state.policy
    tokens = fold(record.journal.read(mark.seq), retake, account.log) if whole else 0
    if not whole and mark.seq <= record.journal.last_seq:
        _begin_anew(record, report)
    retake.contributions()
    if state.admission is None:
        return Resumed([], True)
    lost = _count_lost(record, folder, report)
    if saved and not retake.steps:
        account.load(saved["account"])
    steps = len(retake.steps)
    origin = "the start" if step is None else f"the checkpoint of step {step}"
    report(
        f"resuming {folder.path} at step {state.version}"
        + (f", {steps} of its steps taken again since {origin}" if steps else "")
        + (f"; {tokens} tokens come from the journal" if tokens else "")
        + (f"; {lost} tokens that were sampled after the journal's last event are lost" if lost else "")
    )
    return Resumed([one.step for one in retake.steps if not one.equal], whole)


def fold(
    records: Iterator[Stored],
    retake: Retake,
    on_step: Callable[[happened.StepTaken, Any], None],
) -> int:
    """Take the state through a journal's records, and the cell through their gradients and steps.

    Returns:
        The tokens that were in them.

    Raises:
        RunError: a record does not follow from those before it.
    """
    state, tokens = retake.state, 0
    opened: dict[int, str] = {}
    for stored in records:
        try:
            for event in decode(stored.body, stored.payload):
                match event:
                    case happened.TokensDrawn():
                        tokens += event.tokens
                    case happened.ContributionOpened():
                        opened[event.number] = event.fingerprint
                    case happened.StepTaken():
                        retake.step(event, opened)
                        opened = {}
                settled = state.apply(event)
                if isinstance(event, happened.StepTaken):
                    on_step(event, settled)
        except (
            KeyError,
            ValueError,
            IndexError,
            TypeError,
            AttributeError,
            AssertionError,
            RuntimeError,
        ) as error:
            if isinstance(error, RunError | UserError):
                raise
            raise RunError(
                f"record {stored.seq} ({stored.kind}) of the journal does not follow from those before it: {error!r}"
            ) from error
    return tokens


def give_up_contributions(record: Record, cell: str, incarnation: int) -> None:
    """Give up gradient sums that no cell goes on with: all but those received, and this incarnation's own."""
    for one in list(record.state.contributions.values()):
        here = one.gradients and (one.cell, one.incarnation) == (cell, incarnation)
        if not one.received and not here:
            record.emit(happened.ContributionLost(one.number, "its cell is gone"))


def rebase(record: Record, cell: LocalCell, resumed: Resumed, report: Callable[[str], None]) -> bool:
    """Say where the journal no longer leads from the last checkpoint to here; a checkpoint must follow at once.

    Returns:
        Whether it is so.
    """
    if resumed.whole and not resumed.changed:
        return False
    report(
        f"from step {resumed.changed[0]} on the weights are other bits than before (other threads or libraries)"
        if resumed.changed
        else "the journal does not hold what led to the checkpoint: the run goes on from the checkpoint alone"
    )
    state = record.state
    snapshot = None if resumed.whole else state.to_dict()
    record.emit(happened.Rebased(state.version, cell.digest(), cell.policy.weights_id, snapshot))
    return True


def refuse_changed(saved: dict[str, Any], config: Config) -> None:
    """Refuse settings that trajectories made under `saved` contradict.

    Raises:
        UserError: which one, and what it was.
    """
    now = config.to_dict()
    for section, names in KEPT_SETTINGS.items():
        for name in names:
            # What is not set is left out.
            then, given = saved[section].get(name), now[section].get(name)
            if then != given:
                raise UserError(
                    f"{section}.{name} was {then!r} when this run was saved and is {given!r} now; a run keeps it to "
                    "its end. For another value begin a new run with model.name = one of this run's checkpoints"
                )


def _check_rest(journal: Journal, mark: Mark, state: RunState, config: Config) -> None:
    """Refuse what the journal after the checkpoint contradicts, before anything is cut."""
    started, version, first = _started(state), state.version, state.config is None
    for stored in journal.read(mark.seq, kinds=("start", "base", "admit", "close", "step")):
        for event in decode(stored.body, kinds=("start", "base", "admit", "close", "step")):
            match event:
                case happened.RunStarted() if first:
                    refuse_changed(event.config, config)
                    first = False
                case happened.Rebased() if event.snapshot is not None:
                    raise RunError(
                        f"a part of the journal before step {event.step} is lost, and the checkpoint that stood for it "
                        "is gone, so this run cannot go on; begin a new one with model.name = what is left of it"
                    )
                case happened.GroupAdmitted():
                    started += 1
                case happened.GroupClosed():
                    started -= 1
                case happened.StepTaken():
                    version = event.step
    _check_steps(started, version, config)


def _started(state: RunState) -> int:
    """Groups that were consumed or are outstanding."""
    admission = state.admission
    return 0 if admission is None else admission.consumed + len(admission.outstanding)


def _check_steps(started: int, version: int, config: Config) -> None:
    """More steps than before are welcome, fewer than were started are not."""
    line = config.line
    if line.steps * line.groups_per_step < started:
        raise UserError(
            f"line.steps = {line.steps} is too few: this run has completed {version} steps and started "
            f"groups for {-(-started // line.groups_per_step)}"
        )


def _begin_anew(record: Record, report: Callable[[str], None]) -> None:
    """Another run's journal lies here: set it aside, and write one of our own."""
    assert record.journal is not None
    path = record.journal.path
    record.journal.close()
    kept_as = Journal.set_aside(path)
    record.journal = Journal.open(path)
    report(f"the journal belongs to another run, or to another course of this one; it is now {kept_as.name}")


def _count_lost(record: Record, folder: RunFolder, report: Callable[[str], None]) -> int:
    """Tokens that were noted when they were drawn, and are in no record."""
    noted, generated = folder.noted_generated(), record.state.ledger.generated
    if generated and not noted:
        report("the count of generated tokens is missing, so what the interrupted unit lost is not known")
    lost = max(0, noted - generated)
    if lost:
        record.emit(happened.TokensLost(lost))
    return lost
