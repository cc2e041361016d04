"""`headrace state`: what a run holds, and where it lies."""

from __future__ import annotations

import time
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headrace.cli.app import app
from headrace.cli.console import say, shown
from headrace.cli.folders import RUN_HELP, open_run
from headrace.cli.tables import ago

if TYPE_CHECKING:
    from headrace.runs.folder import RunFolder
    from headrace.runs.history import History

SHOWN_IDENTITIES = 5
"""Per tier, the identities shown whose KV was used last."""


@app.command(epilog="[bold]Examples[/bold]\n\n  headrace state runs/addition-001")
def state(run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)]) -> None:
    """Show what lies where: checkpoints, the journal, weights, keys and values, the queue."""
    from headrace.runs.endings import state_of
    from headrace.runs.reading import read_history

    console = Console()
    folder = open_run(run)
    history = read_history(folder)
    state = state_of(folder, history)
    say(console, f"{shown(folder.path)}: {state}")
    for title, lines in (
        ("checkpoints", _checkpoints(folder)),
        ("journal", _journal(folder, history)),
        ("weights", _weights(folder, history)),
        ("keys and values", _kv(folder)),
        ("queue", [*_queue(history), *_interrupted(folder, history, state)]),
    ):
        say(console, f"\n{title}")
        for line in lines:
            say(console, f"  {line}")


def _checkpoints(folder: RunFolder) -> list[str]:
    places = [folder.checkpoint_path(step) for step in folder.checkpoints()]
    if folder.final_path.is_dir():
        places.append(folder.final_path)
    return [f"{place.relative_to(folder.path)!s:24} {_size(_bytes(place)):>12}" for place in places] or [
        "none yet"
    ]


def _journal(folder: RunFolder, history: History) -> list[str]:
    path = folder.journal_path
    lines = []
    if path.exists():
        size = sum(_file_bytes(file) for file in folder.path.glob(f"{path.name}*") if _is_part(file, path))
        lines.append(f"{path.name:24} {_size(size):>12}  {history.records:,} records")
    else:
        lines.append("none")
    if history.last is not None:
        kind, at = history.last
        lines.append(f"the last event is {kind}, {ago(at)}")
    if history.damage is not None:
        lines.append(f"it is damaged {history.damage}")
    for aside in sorted(folder.path.glob(f"{path.name}.damaged-*")):
        if not aside.name.endswith(("-wal", "-shm")):
            lines.append(f"{aside.name:24} {_size(aside.stat().st_size):>12}  set aside")
    return lines


def _is_part(file: Path, journal: Path) -> bool:
    return file.name.removeprefix(journal.name) in ("", "-wal", "-shm")


def _weights(folder: RunFolder, history: History) -> list[str]:
    done = max(history.steps, default=0)
    kept = set(folder.checkpoints())
    wanted = sorted(kept | {done})
    lines = []
    for version in wanted:
        step = history.steps.get(version)
        name = (
            step.weights_id if step is not None and step.weights_id else "as loaded" if version == 0 else "?"
        )
        places = [f"checkpoints/step-{version}"] if version in kept else []
        places += ["final"] if folder.final_path.is_dir() and version == done else []
        where = ", ".join(places) or "not saved; a resume computes them again from the journal"
        lines.append(f"version {version:<6} {name[:16]:16}  {where}")
    return lines


def _kv(folder: RunFolder) -> list[str]:
    """What each tier holds, by the weights (and the rest of the identity) that it belongs to."""
    from headrace.engine.kv import disk_folder, shared_name_of
    from headrace.state.report import age, kv_report

    engine = folder.config.engine
    limits = {"host": engine.kv_host_mb, "disk": engine.kv_disk_mb}
    place = Path(engine.kv_disk_folder) if engine.kv_disk_folder else disk_folder()
    report = kv_report(shared_name_of(folder.path), place)
    lines = [f"device      up to {engine.prefix_cache_mb:,} MB, inside the process that runs"]
    for tier, limit in limits.items():
        items = sorted((item for item in report if item["tier"] == tier), key=age)
        # The disk is shared by all runs: for one that does not use it there is nothing to say.
        if not limit:
            lines.append(f"{tier:10}  not used (engine.kv_{tier}_mb = 0)")
            continue
        blocks, size = (sum(item[name] for item in items) for name in ("blocks", "bytes"))
        lines.append(f"{tier:10}  {_size(size)} of {limit:,} MB, {blocks:,} blocks")
        for item in items[:SHOWN_IDENTITIES]:
            lines.append(
                f"  {item['identity'][:16]}  {_size(item['bytes']):>10}, {item['blocks']:,} blocks, "
                f"used {ago(time.time() - age(item))}"
            )
        if len(items) > SHOWN_IDENTITIES:
            lines.append(f"  and {len(items) - SHOWN_IDENTITIES} more")
    return lines


def _queue(history: History) -> list[str]:
    from headrace.runs.state import Status

    outstanding = [group for group in history.groups.values() if group.outstanding]
    flying = list(history.attempts_in_flight)
    count = {status: sum(attempt.status is status for attempt in flying) for status in Status}
    deadlines = [group.deadline for group in outstanding]
    due = f", the first due at version {min(deadlines)}" if deadlines else ""
    return [
        f"{len(outstanding)} groups outstanding{due}",
        f"{count[Status.DECODING]} trajectories to decode, {count[Status.AT_ENVIRONMENT]} at their environment, "
        f"{count[Status.REWARDED]} rewarded and not trained yet",
        f"{sum(attempt.tokens for attempt in flying):,} tokens in flight, {history.lost:,} lost in crashes",
    ]


def _interrupted(folder: RunFolder, history: History, state: str) -> list[str]:
    """What the unit that was under way when the run ended has lost, which the journal learns from a resume only."""
    from headrace.runs.endings import unaccounted

    if history.running:
        return []
    lost = unaccounted(folder, history)
    if lost is None and state == "killed":
        return [
            "what the interrupted unit lost is not known: the count of sampled tokens or a part of the journal is gone"
        ]
    return [f"{lost:,} tokens of the interrupted unit are lost; a resume counts them as such"] if lost else []


def _bytes(folder: Path) -> int:
    return sum(map(_file_bytes, folder.rglob("*")))


def _file_bytes(file: Path) -> int:
    """A file's size; of one that a running line has just taken away, and of a folder, none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return 0
    return found.st_size if S_ISREG(found.st_mode) else 0


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError
