"""How the commands find the run that they are given, by its folder or by its name under `runs/`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.console import shown
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.runs.folder import RunFolder

RUNS = Path("runs")
"""Where `headrace train` puts runs, and `headrace runs list` looks for them."""

RUN_HELP = "A run's folder, or its name under runs/."


def find_run(run: Path) -> Path:
    """The folder of a run: `run` itself, or for a bare name the one in `RUNS` where there is none here.

    Raises:
        UserError: there is no such folder.
    """
    bare = len(run.parts) == 1 and not run.is_absolute()
    for path in (run, RUNS / run) if bare else (run,):
        if path.is_dir():
            return path
    where = f"neither here nor in {RUNS}/" if bare else "no such folder"
    raise UserError(f"{run} is not a run folder: {where}; `headrace runs list` shows the runs of {RUNS}/")


def open_run(run: Path) -> RunFolder:
    """Open a run's folder to read only; see `find_run`.

    Raises:
        UserError: it cannot be found or read.
    """
    from headrace.runs.folder import CONFIG, RunFolder
    from headrace.runs.reading import UnreadableRun

    path = find_run(run)
    try:
        if (path / CONFIG).is_dir():
            raise UnreadableRun(Path(shown(path)), f"{CONFIG} cannot be read", "it is a folder")
        return RunFolder.open(path, read_only=True)
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read: {error.strerror}; check its permissions") from error
