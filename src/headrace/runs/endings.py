"""How a run ended, or that it goes on: one word for it, read from the last events of its journal.

    running    a process holds the run
    complete   it has done everything that its settings ask for
    stopped    asked to (Ctrl-C, SIGTERM), or through with fewer steps than its settings ask for now; all is saved
    failed     by an error that it saw: its environment, its rollouts, or numbers that are not finite
    killed     in the middle of something: `kill -9`, Ctrl-C twice, a crash

What a line records last: `stop` and `checkpoint` when it is asked to stop; `checkpoint` alone when it fails and can
save; a `step` and its `checkpoint` every `line.checkpoint_every` steps and after the last one.
"""

from __future__ import annotations

import numbers

from headrace.runs.folder import GENERATED, RunFolder
from headrace.runs.history import History
from headrace.runs.reading import UnreadableRun, reading
from headrace.runs.results import Evaluation

_CLOCK_SLACK_S = 0.1  # a file's time comes from a coarser clock than an event's


def state_of(folder: RunFolder, history: History) -> str:
    """Where a run is, in a word or two, and whether its journal is damaged.

    Raises:
        UnreadableRun: what says so cannot be read.
    """
    if history.running:
        state = "running"
    elif _complete(folder):
        state = "complete"
    elif history.damage is not None:
        state = "stopped"  # how is in what cannot be read
    elif not folder.journal_path.exists():
        return "stopped, no journal"
    else:
        state = _ending(folder, history)
    return f"{state}, damaged" if history.damage else state


def unaccounted(folder: RunFolder, history: History) -> int | None:
    """Tokens that the unit that was interrupted sampled, and that a resume will count as lost; None if not known.

    Args:
        history: all of it, not a light reading; of a run that is not running.

    Raises:
        UnreadableRun: their count cannot be read.
    """
    with reading(folder, GENERATED):
        noted = folder.noted_generated()
    if history.damage is not None or history.accounted is None or (history.accounted and not noted):
        return None
    return max(0, noted - history.accounted)


def held_out(folder: RunFolder, name: str) -> Evaluation | None:
    """The evaluation "before" or "after" training, None if there is none.

    Raises:
        UnreadableRun: its file cannot be read, or is not as a run writes it.
    """
    file = f"evaluation-{name}.json"
    with reading(folder, file):
        evaluation = folder.evaluation(name)
    if evaluation is None:
        return None
    for field in ("reward", "failed"):
        if not isinstance(getattr(evaluation, field), numbers.Real):
            raise UnreadableRun(folder.path, f"{file}: its {field} is no number")
    return evaluation


def _complete(folder: RunFolder) -> bool:
    with reading(folder, "evaluation-after.json"):
        return folder.complete


def _ending(folder: RunFolder, history: History) -> str:
    if _stopped_by_numbers(folder, history):
        return "failed"
    *before, last = ["", "", *history.tail]
    step = history.checkpoint
    if last != "checkpoint" or step is None:
        return "killed"
    if folder.latest_checkpoint() != step:  # it was announced, and never became whole
        return "killed"
    kind = before[-1]
    if kind == "stop":
        return "stopped"
    line = (history.config or folder.config).line
    if step >= line.steps:
        measured = not folder.config.eval.tasks or held_out(folder, "after") is not None
        return "stopped" if folder.final_path.is_dir() and measured else "killed"
    periodic = kind == "step" and line.checkpoint_every and step % line.checkpoint_every == 0
    # After `base`, alone or with its `start`, a resume had only begun.
    resuming = kind == "base" or before[-2:] == ["base", "start"]
    return "killed" if periodic or resuming else "failed"


def _stopped_by_numbers(folder: RunFolder, history: History) -> bool:
    """Whether the trajectories that stopped the step under way were written after the last event."""
    path = folder.path / "failures" / f"step-{max(history.steps, default=0) + 1}.jsonl"
    last = 0.0 if history.last is None else history.last[1]
    return path.is_file() and path.stat().st_mtime >= last - _CLOCK_SLACK_S
