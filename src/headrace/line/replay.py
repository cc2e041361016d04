"""A run's weights once more, from its journal alone: the proof that the journal holds all that made them.

Invariant: nothing in the run's folder is changed, no environment is asked and no token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.engine import Engine
from headrace.errors import RunError, UserError
from headrace.line.observer import Observer
from headrace.line.production import Production
from headrace.line.recovery import Recovery
from headrace.line.run_folder import RunFolder
from headrace.line.setup import Workplace, set_threads
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.journal import Event, Journal, JournalDamaged
from headrace.state.machine import tune_allocator
from headrace.state.weights import content_digest
from headrace.trainer import load_checkpoint
from headrace.types import Group


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step's digests: the one in the journal, and the one of the weights that were computed again."""

    step: int
    recorded: str
    replayed: str

    @property
    def equal(self) -> bool:
        return self.recorded == self.replayed


def replay(
    run_dir: str | Path, on_step: Callable[[ReplayedStep], None] = lambda step: None
) -> list[ReplayedStep]:
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
            events = journal.read()
            first = next(events, None)
            if first is None or first.kind != "start" or first.body["version"] != 0:
                raise UserError(
                    f"{folder.journal_path} does not begin at the run's first step; only later steps are in it"
                )
            line = _idle_line(first, folder)
            replayer = _Replay(line, on_step)
            replayer.apply(chain([first], _whole(events, folder)))
        except JournalDamaged as error:
            raise RunError(
                f"{folder.journal_path} is damaged: {error}; the steps before it were replayed"
            ) from error
        finally:
            journal.close()
        return replayer.replayed


def _whole(events: Iterator[Event], folder: RunFolder) -> Iterator[Event]:
    """The events, up to where only a checkpoint knows how it went on."""
    for event in events:
        if event.kind == "base" and not event.body["whole"]:
            raise RunError(
                f"a part of the journal before step {event.body['step']} was lost; the steps before it were replayed"
            )
        if event.kind == "base" and event.body["step"] not in folder.checkpoints():
            raise RunError(
                f"at step {event.body['step']} the run went on from weights that were recomputed under other settings, "
                "and their checkpoint is gone; the steps before it were replayed"
            )
        yield event


class _Replay(Recovery):
    """A recovery that writes nothing and tells each step."""

    def __init__(self, line: Production, on_step: Callable[[ReplayedStep], None]) -> None:
        super().__init__(line)
        self._on_step = on_step
        self.replayed: list[ReplayedStep] = []

    def log(self, step: int, groups: list[Group], metrics: dict[str, Any]) -> None:
        self.replayed.append(ReplayedStep(*self.steps[-1]))
        self._on_step(self.replayed[-1])

    def _start(self, body: dict[str, Any]) -> None:
        """Each time the run was started it may have had other settings."""
        config = Config.from_dict(body["config"])
        line, trainer = self.line, self.line.cell.trainer
        line.config = line.episodes.config = config
        line.admission.steps = trainer.total_steps = config.line.steps
        trainer.config, trainer.trainer_config = config.algorithm, config.trainer

    def _base(self, body: dict[str, Any]) -> None:
        """From here on the run went on from a checkpoint."""
        path = self.line.folder.checkpoint_path(body["step"])
        load_checkpoint(path, self.line.model.module, self.line.cell.trainer)


class _NoPool:
    """Stands for an environment that is never asked."""

    def __init__(self, multi_turn: bool) -> None:
        self.multi_turn = multi_turn


def _idle_line(start: Event, folder: RunFolder) -> Production:
    """A line as it was at its first event, without an environment."""
    config = Config.from_dict(start.body["config"])
    set_threads(config)
    tune_allocator()
    model = load_model(
        resolve(config.model.name),
        dtype=config.model.dtype,
        device=config.model.device,
        attn_implementation=ATTENTION,
    )
    settings = config.engine.model_copy(
        update={"weight_format": "float32", "prefix_cache_mb": 0, "kv_host_mb": 0, "kv_disk_mb": 0}
    )
    engine = Engine(model, settings, content_digest(model.module))
    pool: Any = _NoPool(start.body["multi_turn"])
    line = Production(Workplace(config, pool, model, engine), folder, Observer(), lambda: False)
    if line.cell.trainer.digest() != start.body["digest"]:
        raise UserError(f"{config.model.name} is not what this run started from: its weights are others")
    return line
