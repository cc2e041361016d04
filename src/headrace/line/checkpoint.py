"""A checkpoint of a line: weights, optimizer state, the state of the run, and the place in the journal it stands for.

Invariants
* Everything that decides what the line does next is saved: a resume goes on with the same tasks, counters and
  trajectories, under the same bound. Gradients are not: those of the step under way are taken again.
* What came after a checkpoint is in the journal. A checkpoint names the journal that led to it, and no other is read.
"""

from __future__ import annotations

from typing import Any

from headrace.line.account import Account
from headrace.line.cell import LocalCell
from headrace.line.record import Record
from headrace.models import LoadedModel
from headrace.runs.events import CheckpointWritten
from headrace.runs.folder import RunFolder
from headrace.state.journal import Journal, JournalDamaged
from headrace.trainer import save_checkpoint


def save(record: Record, cell: LocalCell, model: LoadedModel, folder: RunFolder, account: Account) -> None:
    """Write the checkpoint of the last completed step, and remove the oldest ones.

    Raises:
        CheckpointError: the disk refused; the checkpoints before it are intact.
    """
    state, journal = record.state, record.journal
    assert journal is not None
    assert state.config is not None
    record.emit(CheckpointWritten(state.version))
    record.commit()
    line_state: dict[str, Any] = {
        "state": state.to_dict(),
        "journal": list(journal.mark),
        "account": account.to_dict(),
    }
    path = folder.checkpoint_path(state.version)
    save_checkpoint(path, model.module, model.path, cell.trainer_state(), line_state)
    folder.prune(state.config.line.keep_checkpoints)


def open_journal(folder: RunFolder, report: Any) -> Journal:
    """The run's journal. Of a damaged one what stands before the damage is kept, and the rest set aside."""
    path = folder.journal_path
    try:
        return Journal.open(path)
    except JournalDamaged as error:
        salvaged = Journal.salvage(path)
        kept = 0 if salvaged is None else salvaged.last_seq
        report(
            f"the journal is damaged ({error}): its first {kept} records are kept, what followed is lost"
            + ("" if salvaged is None else f"; the damaged file is now {salvaged.kept_as.name}")
        )
        return Journal.open(path)
