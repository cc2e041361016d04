"""Held-out reward outside a run: of a settings file's model, or of what a run has saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config
from headrace.errors import UserError
from headrace.line.evaluate import evaluate
from headrace.line.setup import prepare
from headrace.runs.folder import RunFolder
from headrace.runs.results import Evaluation
from headrace.trainer import verify_checkpoint


@dataclass(frozen=True, slots=True)
class Candidate:
    """What to measure: the settings, and the folder of the weights (None: those the settings name).

    `step` is the number of optimizer steps behind the weights.
    """

    config: Config
    model_path: Path | None
    step: int

    def evaluate(self) -> Evaluation:
        """Load the model and answer the held-out tasks.

        Raises:
            UserError: `eval.tasks` is 0, or what `prepare` refuses.
        """
        if not self.config.eval.tasks:
            raise UserError(
                "eval.tasks = 0 measures nothing; set it to the number of held-out tasks to answer"
            )
        # Nothing is rolled out here, so the weights that would do so are never quantised.
        engine = self.config.engine.model_copy(update={"weight_format": "float32"})
        with prepare(self.config.model_copy(update={"engine": engine}), self.model_path) as workplace:
            return evaluate(workplace, self.step)


def candidate(target: str | Path, checkpoint: int | None = None) -> Candidate:
    """The weights that `target` stands for.

    Args:
        target: a settings file, or a run's folder: then its final model, or the checkpoint of a step.
        checkpoint: that step.

    Raises:
        UserError: there is no such file, folder or checkpoint.
    """
    target = Path(target)
    if not target.is_dir():
        if checkpoint is not None:
            raise UserError(f"--checkpoint needs a run folder, and {target} is none")
        return Candidate(Config.load(target), None, 0)
    with RunFolder.open(target, read_only=True) as folder:
        steps = folder.checkpoints()
        if checkpoint is None and folder.final_path.is_dir():
            path, step = folder.final_path, folder.config.line.steps
        elif checkpoint in steps:
            path, step = folder.checkpoint_path(checkpoint), checkpoint
        else:
            raise _not_saved(target, checkpoint, steps)
        verify_checkpoint(path)
        return Candidate(folder.config, path, step)


def _not_saved(target: Path, checkpoint: int | None, steps: list[int]) -> UserError:
    missing = "no final model yet" if checkpoint is None else f"no checkpoint of step {checkpoint}"
    if steps:
        have = f"choose one of its checkpoints with --checkpoint: {', '.join(map(str, steps))}"
    else:
        have = f"it has no checkpoint either; train on with --resume {target}"
    return UserError(f"{target} has {missing}; {have}")
