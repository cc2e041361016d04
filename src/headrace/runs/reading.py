"""Reads a run's history from its folder, also while the run goes on.

Invariants
* Reading changes nothing in the run's folder and holds no run up.
* A damaged journal is read up to the damage, which `History.damage` names.
* What cannot be read at all is an `UnreadableRun`, which names it: one odd run is no reason to see none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import RunError, UserError
from headrace.locks import file_is_locked
from headrace.runs.events import Event, TokensDrawn, decode, kinds_of
from headrace.runs.folder import JOURNAL, LOCK, METRICS, RunFolder
from headrace.runs.history import TAIL_EVENTS, History, StepHistory
from headrace.schedule import Bucket
from headrace.state.journal import Journal, JournalDamaged, Stored
from headrace.types import TrajectoryId

LIGHT_KINDS = ("start", "step", "checkpoint", "stop", "lost", "base")
"""Events that are few and short: enough for an overview of a run."""

READ_METRICS = (
    "reward_mean",
    "completion_tokens_mean",
    "completed_ratio",
    "tokens_trained",
    "staleness_mean",
    "time_step_s",
    "tokens_generated_total",
    *(f"ledger_{bucket}" for bucket in Bucket),
)
"""What is told of a step: each is a number or null, or the run's file is not as a run writes it."""


class UnreadableRun(UserError):
    """Something in a run's folder cannot be read; `reason` says what, in a few words."""

    def __init__(self, path: Path, reason: str, detail: object = None) -> None:
        because = "" if detail is None else f" ({detail})"
        super().__init__(f"{path}: {reason}{because}; mend it, or move it away to see the rest")
        self.reason = reason


@contextmanager
def reading(folder: RunFolder, name: str) -> Iterator[None]:
    """Turn the disk's refusal to read the run's file `name` into an `UnreadableRun`."""
    try:
        yield
    except OSError as error:
        raise UnreadableRun(
            folder.path, f"{name} cannot be read", (error.strerror or str(error)).lower()
        ) from error


def read_history(folder: RunFolder, keep: TrajectoryId | None = None, *, light: bool = False) -> History:
    """A run's history. Steps that its journal does not hold come from its `metrics.jsonl`.

    Args:
        folder: the run, opened to read only.
        keep: the attempt whose turns and answers to keep.
        light: only an overview, without groups and attempts; all of the journal is checked even so.

    Raises:
        UnreadableRun: something in the folder cannot be read, or is not as a run writes it.
    """
    history = History(keep, light=light)
    # Asked first: of a run that ends meanwhile it is right to say that it ran.
    history.running = is_running(folder.path)
    _read_journal(folder, history)
    with reading(folder, METRICS):
        lines = folder.metrics()
    for metrics in lines:
        step = metrics["step"]
        history.steps.setdefault(step, StepHistory(step, None, None, None, metrics))
    history.steps = dict(sorted(history.steps.items()))
    for step, one in history.steps.items():
        name = METRICS if one.at is None else JOURNAL
        if isinstance(step, bool) or step < 1:
            raise UnreadableRun(folder.path, f"{name} has a step {step}")
        for field_name in READ_METRICS:
            value = one.metrics.get(field_name)
            if value is not None and not isinstance(value, int | float):
                raise UnreadableRun(folder.path, f"{name}: {field_name} of step {step} is no number")
    return history


def _read_journal(folder: RunFolder, history: History) -> None:
    path = folder.journal_path
    with reading(folder, path.name):
        if not path.exists():
            history.accounted = None
            return
    try:
        journal = Journal.open(path, read_only=True)
        try:
            for stored in journal.read(kinds=LIGHT_KINDS if history.light else None):
                _add(folder, history, stored)
            if history.light:
                _read_tail(folder, history, journal)
        finally:
            journal.close()
    except JournalDamaged as error:
        history.damage = error
    except RunError as error:
        detail = "it is a folder" if path.is_dir() else error
        raise UnreadableRun(folder.path, f"{path.name} cannot be read", detail) from error


def _read_tail(folder: RunFolder, history: History, journal: Journal) -> None:
    """Take the kinds of the last events."""
    history.records = journal.last_seq
    history.tail.clear()
    for stored in journal.read(max(0, history.records - TAIL_EVENTS)):
        with _decoding(folder, stored):
            history.tail.extend(kinds_of(stored.body))
            history.last = (history.tail[-1], stored.at)


def _add(folder: RunFolder, history: History, stored: Stored) -> None:
    with _decoding(folder, stored):
        events = list(decode(stored.body, kinds=LIGHT_KINDS if history.light else None))
        if history.keep is not None and _holds_tokens_of(history.keep, events):
            events = list(decode(stored.body, stored.payload))
        history.add(stored.seq, stored.at, events)


def _holds_tokens_of(key: TrajectoryId, events: list[Event]) -> bool:
    return any(isinstance(one, TokensDrawn) and any(row.id == key for row in one.rows) for one in events)


@contextmanager
def _decoding(folder: RunFolder, stored: Stored) -> Iterator[None]:
    """Turn what a record raises that no run has written into an `UnreadableRun`."""
    try:
        yield
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        RuntimeError,
        AssertionError,
    ) as error:
        raise UnreadableRun(
            folder.path,
            f"record {stored.seq} ({stored.kind}) of {JOURNAL} is not as this version of headrace writes it",
            repr(error),
        ) from error


def is_running(run_dir: Path) -> bool:
    """Whether some process holds the run's lock."""
    return file_is_locked(run_dir / LOCK)
