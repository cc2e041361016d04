"""What every command prints through: plain lines, short paths, and what headrace logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from headrace.runs.printable import printable


def say(console: Console, text: str) -> None:
    """Print a line as it is, however long; what the console cannot encode is shown escaped."""
    console.print(printable(text, console.file), markup=False, highlight=False, soft_wrap=True)


def shown(path: Path) -> str:
    """A path as short as it can be typed here."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class _ConsoleLog(logging.Handler):
    """Prints log records as plain lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say(self._console, record.getMessage())


@contextmanager
def logged(console: Console) -> Iterator[None]:
    """Show what headrace logs inside the block (a model that is being fetched, say)."""
    logger, handler = logging.getLogger("headrace"), _ConsoleLog(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
