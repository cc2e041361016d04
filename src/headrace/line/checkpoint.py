"""The line's own state in a checkpoint, and how a line goes on from it.

Invariants
* Everything that decides what the line does next is saved: a resume goes on with the same tasks, counters and
  trajectories, under the same bound. Gradients are not: those of the step under way are taken again.
* What came after the checkpoint is in the journal, up to the unit of work that was interrupted. A checkpoint names the
  journal that led to it, and no other is read.
* Settings that the saved trajectories were made under stay as they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.config import Config
from headrace.errors import RunError, UserError
from headrace.line.recovery import Recovery, refuse_changed
from headrace.schedule import Admission, Bucket, Ledger
from headrace.state.journal import BEGINNING, Event, Journal, JournalDamaged, Mark
from headrace.trainer import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from headrace.line.production import Production


def open_journal(line: Production) -> Journal:
    """The run's journal. Of a damaged one what stands before the damage is kept, and the rest set aside."""
    path = line.folder.journal_path
    try:
        return Journal.open(path)
    except JournalDamaged as error:
        salvaged = Journal.salvage(path)
        kept = 0 if salvaged is None else salvaged.last_seq
        line.observer.on_message(
            f"the journal is damaged ({error}): its first {kept} events are kept, what followed is lost"
            + ("" if salvaged is None else f"; the damaged file is now {salvaged.kept_as.name}")
        )
        return Journal.open(path)


def begin(line: Production, resumed: bool) -> None:
    """Note in the journal with which settings and weights the line starts."""
    line.journal.record(
        "start",
        {
            "config": line.config.to_dict(),
            "version": line.cell.version,
            "weights_id": line.cell.weights_id,
            "digest": line.cell.trainer.digest(),
            "resumed": resumed,
            "multi_turn": line.episodes.multi_turn,
            "threads": torch.get_num_threads(),
        },
    )
    line.journal.commit()


def save(line: Production) -> None:
    """Write the checkpoint of the last completed step, and remove the oldest ones.

    Raises:
        CheckpointError: the disk refused; the checkpoints before it are intact.
    """
    line.journal.record("checkpoint", {"step": line.admission.version})
    line.journal.commit()
    path = line.folder.checkpoint_path(line.admission.version)
    save_checkpoint(path, line.model.module, line.model.path, line.cell.trainer.state_dict(), _state(line))
    line.folder.prune(line.config.line.keep_checkpoints)


def restore(line: Production) -> None:
    """Go on from the last checkpoint, or from step 0 when there is none, and from what the journal holds after it.

    Raises:
        UserError: the settings are not those that the run was saved under.
        RunError: what the run went on from is gone.
    """
    step = line.folder.latest_checkpoint()
    state: dict[str, Any] = {}
    mark = BEGINNING
    if step is not None:
        state = load_checkpoint(line.folder.checkpoint_path(step), line.model.module, line.cell.trainer)
        refuse_changed(state["settings"], line.config)
        _check_steps(state, line.config)
        mark = Mark(*state["journal"])
    elif (started := next(line.journal.read(kinds=("start",)), None)) is not None:
        refuse_changed(started.body["config"], line.config)
    whole = line.journal.holds(mark)
    if whole:
        _refuse_gap(line, mark)
    # Only now is anything cut: what is refused stays as it is.
    for name, last in line.folder.rewind(step or 0).items():
        if last < (step or 0):
            line.observer.on_message(
                f"{name} ends at step {last}: its lines up to step {step} are missing, and stay so"
            )
    recovery = Recovery(line)
    if step is not None:
        line.cell.version, line.cell.weights_id = state["version"], state["weights_id"]
        _load_state(line, state)
        # Gradients are not part of a checkpoint: those of the step under way are taken again, as they were.
        recovery.apply(Event(0, 0.0, "gradient", unit) for unit in state["units"])
    if whole:
        recovery.apply(line.journal.read(mark.seq))
    elif mark.seq <= line.journal.last_seq:
        _begin_anew(line)
    noted = line.folder.noted_generated()
    if line.ledger.generated and not noted:
        line.observer.on_message(
            "the count of generated tokens is missing, so what the interrupted unit lost is not known"
        )
    lost = max(0, noted - line.ledger.generated)
    if lost:
        line.journal.record("lost", {"tokens": lost})
        line.ledger.generate(lost)
        line.ledger.settle(Bucket.LOST, lost)
    line.cell.publish()
    line.episodes.take_up()
    # What it took to come here belongs to no step.
    line.cell.take_seconds()
    if not recovery.steps:
        line.cell.seconds.update(state.get("step_seconds", {}))
    _report(line, step, recovery, lost)
    changed = [number for number, recorded, now in recovery.steps if recorded != now]
    if changed or not whole:
        _rebase(line, changed, whole)


def _refuse_gap(line: Production, mark: Mark) -> None:
    for event in line.journal.read(mark.seq, kinds=("base",)):
        if not event.body["whole"]:
            raise RunError(
                f"a part of the journal before step {event.body['step']} is lost, and the checkpoint that stood for it "
                "is gone, so this run cannot go on; begin a new one with model.name = what is left of it"
            )


def _begin_anew(line: Production) -> None:
    """Another run's journal lies here: set it aside, and write one of our own."""
    line.journal.close()
    kept_as = Journal.set_aside(line.folder.journal_path)
    line.journal = Journal.open(line.folder.journal_path)
    line.observer.on_message(
        f"the journal belongs to another run, or to another course of this one; it is now {kept_as.name}"
    )


def _report(line: Production, step: int | None, recovery: Recovery, lost: int) -> None:
    steps = len(recovery.steps)
    origin = "the start" if step is None else f"the checkpoint of step {step}"
    line.observer.on_message(
        f"resuming {line.folder.path} at step {line.admission.version}"
        + (f", {steps} of its steps taken again since {origin}" if steps else "")
        + (f"; {recovery.tokens} tokens come from the journal" if recovery.tokens else "")
        + (f"; {lost} tokens that were sampled after the journal's last event are lost" if lost else "")
    )


def _rebase(line: Production, changed: list[int], whole: bool) -> None:
    """Write a checkpoint at once, since the journal no longer leads from the last one to here."""
    line.observer.on_message(
        f"from step {changed[0]} on the weights are other bits than before (other settings, threads or libraries)"
        if changed
        else "the journal does not hold what led to the checkpoint: the run goes on from the checkpoint alone"
    )
    body = {"step": line.admission.version, "digest": line.cell.trainer.digest(), "whole": whole}
    line.journal.record("base", body)
    save(line)


def _state(line: Production) -> dict[str, Any]:
    return {
        "version": line.admission.version,
        "journal": list(line.journal.mark),
        "settings": line.config.to_dict(),
        "units": line.units,
        "weights_id": line.cell.weights_id,
        "admission": line.admission.state_dict(),
        "ledger": line.ledger.to_dict(),
        "ledger_before": line.account.books,
        "episodes": line.episodes.state_dict(),
        "next_group": line.intake.next_group,
        "next_task": line.intake.next_task,
        "skipped": line.intake.skipped,
        "failed_groups": line.failed_groups,
        "failed_in_a_row": line.failed_in_a_row,
        "replaced": line.replaced,
        "step_seconds": dict(line.cell.seconds),
        "step_elapsed_s": line.account.elapsed_s,
    }


def _load_state(line: Production, state: dict[str, Any]) -> None:
    line.admission = Admission.from_state(state["admission"] | {"steps": line.config.line.steps})
    line.ledger = line.episodes.ledger = Ledger.from_dict(state["ledger"])
    line.intake.next_group, line.intake.next_task = state["next_group"], state["next_task"]
    line.intake.skipped, line.replaced = state["skipped"], state["replaced"]
    line.failed_groups, line.failed_in_a_row = state["failed_groups"], state["failed_in_a_row"]
    line.episodes.load_state(state["episodes"])
    line.pending = list(line.admission.committed)
    line.open_account(state["ledger_before"], state["step_elapsed_s"])
    line.metrics.extend(line.folder.metrics())


def _check_steps(saved: dict[str, Any], config: Config) -> None:
    """More steps than before are welcome, fewer than were started are not."""
    line, state = config.line, saved["admission"]
    started = state["consumed"] + len(state["outstanding"])
    if line.steps * line.groups_per_step < started:
        raise UserError(
            f"line.steps = {line.steps} is too few: this run has completed {state['version']} steps and started "
            f"groups for {-(-started // line.groups_per_step)}"
        )
