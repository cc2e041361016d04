"""Tables about runs, and how their numbers are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.runs.printable import printable

if TYPE_CHECKING:
    from headrace.runs.history import AttemptHistory, History, StepHistory


def steps_table(steps: Sequence[StepHistory], of: int) -> Table:
    """The last steps of a run that has taken `of`."""
    caption = f"the last {len(steps)} of {of} steps" if len(steps) < of else f"{of} steps"
    table = Table(caption=caption)
    for column in ("step", "reward", "length", "ended", "trained tokens", "staleness", "seconds"):
        table.add_column(column, justify="right")
    for step in steps:
        metrics = step.metrics
        ended = metrics.get("completed_ratio")
        table.add_row(
            str(step.step),
            number(metrics.get("reward_mean")),
            number(metrics.get("completion_tokens_mean"), ".1f"),
            "" if ended is None else f"{ended:.0%}",
            number(metrics.get("tokens_trained"), ",.0f"),
            number(metrics.get("staleness_mean"), ".2f"),
            number(metrics.get("time_step_s"), ".1f"),
        )
    return table


def cell(text: str, console: Console) -> Text:
    """A table's cell with the text as it is; what the console cannot encode is shown escaped."""
    return Text(printable(text, console.file))


def attempts_table(attempts: Sequence[AttemptHistory], history: History, console: Console) -> Table:
    """One row for each attempt."""
    from headrace.runs.transcript import task_text

    rows = [
        (
            str(attempt.id),
            " ".join(task_text(history.groups[attempt.id.group].task).split()),
            attempt.status,
            number(attempt.reward),
            str(attempt.tokens),
            str(attempt.turns),
            "" if attempt.oldest_version is None else str(attempt.oldest_version),
            "" if attempt.step is None else str(attempt.step),
            attempt.bucket or "",
        )
        for attempt in attempts
    ]
    table = Table(expand=True)
    for place, column in enumerate(
        ("id", "task", "status", "reward", "tokens", "turns", "oldest", "step", "went to")
    ):
        if column == "task":  # it alone gives way where the terminal is narrow
            table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            width = max([len(column), *(len(row[place]) for row in rows)])
            right = column in ("reward", "tokens", "turns", "oldest", "step")
            table.add_column(column, no_wrap=True, min_width=width, justify="right" if right else "left")
    for row in rows:
        table.add_row(*(cell(text, console) for text in row))
    return table


def ago(at: float) -> str:
    """How long ago a unix time is."""
    seconds = max(0.0, time.time() - at)
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else f"{value:{form}}"


def span(numbers: list[int]) -> str:
    """From where to where some numbers go."""
    return f"{min(numbers)} to {max(numbers)}" if numbers else "none yet"
