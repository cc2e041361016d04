"""A run's weights once more, from its journal alone: the proof that the journal holds all that made them.

Invariant: nothing in the run's folder is changed, no environment is asked and no token is drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from headrace.algorithms import load_algorithm
from headrace.config import Config
from headrace.errors import RunError, UserError
from headrace.line.cell import LocalCell
from headrace.line.resume import fold
from headrace.line.retake import Retake, RetakenStep
from headrace.line.setup import set_threads
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.runs.events import Rebased, RunStarted, decode
from headrace.runs.folder import RunFolder
from headrace.runs.state import RunState
from headrace.schedule.units import POLICY, PolicyVersion
from headrace.state.journal import Journal, JournalDamaged, Stored
from headrace.state.machine import tune_allocator
from headrace.trainer import Trainer, load_checkpoint


def replay(
    run_dir: str | Path, on_step: Callable[[RetakenStep], None] = lambda step: None
) -> list[RetakenStep]:
    """Compute every step's weights again, from the loaded model on, on the threads that were used.

    Raises:
        UserError: the run has no journal that begins at its first step, or was made from other weights.
        RunError: the journal contradicts itself.
    """
    with RunFolder.open(run_dir, read_only=True) as folder:
        if not folder.journal_path.exists():
            raise UserError(f"{folder.path} has no {folder.journal_path.name}: nothing can be replayed")
        journal = Journal.open(folder.journal_path, read_only=True)
        try:
            records = journal.read()
            first = next(records, None)
            start = None if first is None else next(decode(first.body), None)
            if first is None or not isinstance(start, RunStarted) or start.number != 0:
                raise UserError(
                    f"{folder.journal_path} does not begin at the run's first step; only later steps are in it"
                )
            module, cell = _cell_at_start(start, folder)
            retake = Retake(RunState(), cell, folder.path)
            whole = _whole(chain([first], records), folder, module, cell)
            fold(whole, retake, lambda event, settled: on_step(retake.steps[-1]))
        except JournalDamaged as error:
            raise RunError(
                f"{folder.journal_path} is damaged: {error}; the steps before it were replayed"
            ) from error
        finally:
            journal.close()
        return retake.steps


def _whole(records: Iterator[Stored], folder: RunFolder, module: Any, cell: LocalCell) -> Iterator[Stored]:
    """The records, up to where only a checkpoint knows how it went on; what a run went on from is loaded."""
    for stored in records:
        yield stored
        for base in decode(stored.body, kinds=("base",)):
            assert isinstance(base, Rebased)
            if base.snapshot is not None:
                raise RunError(
                    f"a part of the journal before step {base.step} was lost; the steps before it were replayed"
                )
            if base.step not in folder.checkpoints():
                raise RunError(
                    f"at step {base.step} the run went on from weights that were recomputed under other settings, "
                    "and their checkpoint is gone; the steps before it were replayed"
                )
            path = folder.checkpoint_path(base.step)
            cell.load(partial(load_checkpoint, path, module))
            cell.policy = PolicyVersion(POLICY, base.step, base.weights_id)


def _cell_at_start(start: RunStarted, folder: RunFolder) -> tuple[Any, LocalCell]:
    """The module and a cell that only trains, as they were at the run's first event."""
    config = Config.from_resolved(start.config)
    set_threads(config)
    tune_allocator()
    model = load_model(
        resolve(config.model.name),
        dtype=config.model.dtype,
        device=config.model.device,
        attn_implementation=ATTENTION,
    )
    file = None if start.algorithm_file is None else folder.path / start.algorithm_file
    algorithm = load_algorithm(config.algorithm, file)
    reference = copy.deepcopy(model.module) if algorithm.settings.kl_coef > 0 else None
    trainer = Trainer(model.module, algorithm, config.trainer, config.line.steps, reference)
    cell = LocalCell(PolicyVersion(POLICY, 0, start.weights_id), None, trainer)
    if cell.digest() != start.digest:
        raise UserError(f"{config.model.name} is not what this run started from: its weights are others")
    return model.module, cell
