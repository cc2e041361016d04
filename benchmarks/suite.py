"""The suite: `python -m benchmarks.suite [ROW ...]`, every row without a name. `make bench` calls it.

To add rows: write `benchmarks/MODULE.py` and put MODULE into `MODULES`. The module exports

    ROWS: tuple[str, ...]                                     the rows that it measures
    measure(rows: Sequence[str]) -> dict[str, report.Row]     all of `rows` (some of ROWS), in one session

makes its rows with `report.against`, `report.within` or `report.yardstick`, runs everything it measures as a
process of its own (`peers.Worker`, `peers.run`), reads limits from `limits.measured()`, and raises
`peers.PeerError` or a `HeadraceError` with one line when it cannot measure. Importing it must not import torch.

Invariants
* Modules run one after the other: nothing else is measured meanwhile.
* A row is written as soon as it is measured; a module that fails costs its own rows only.
* A ratio is compared with the one in the last commit, not with what an earlier call left in the folder.
* What other processes took when a module started stands in its rows (`cores_of_others`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table

from benchmarks import peers, plot, report
from benchmarks.report import Row
from headrace.errors import HeadraceError

MODULES = (
    "limits",
    "generation",
    "trl",
    "training",
    "agreement",
    "publish",
    "controller",
    "start",
    "memory",
    "int8",
    "guess",
    "crash",
    "kv",
    "two",
    "damage",
    "algorithms",
    "history",
)

FALL = 0.1
"""A ratio that fell by more than this share is named."""

BUSY_CORES = 0.1
"""Other processes that take more cores than this spoil what is measured, and are named."""

WIDTH = 150
"""Columns of the table where the output is no terminal."""

REPOSITORY = Path(__file__).resolve().parent.parent


def load() -> dict[str, ModuleType]:
    """Every row's module, in the order of the table."""
    rows: dict[str, ModuleType] = {}
    for name in MODULES:
        module = importlib.import_module(f"benchmarks.{name}")
        for row in module.ROWS:
            if row in rows:
                raise ValueError(f"two modules measure the row {row}")
            rows[row] = module
    return rows


def run(rows: Mapping[str, ModuleType], wanted: Sequence[str]) -> tuple[dict[str, Row], list[str]]:
    """Measure and write the wanted rows, module by module.

    Returns:
        The rows, and one line for each module that could not measure.
    """
    measured: dict[str, Row] = {}
    failures: list[str] = []
    for module in dict.fromkeys(rows[name] for name in wanted):
        names = [name for name in wanted if rows[name] is module]
        print(f"measuring {', '.join(names)}", flush=True)
        busy = report.busy_cores()
        if busy > BUSY_CORES:
            print(
                f"warning: other processes use {busy:.1f} cores; what is measured now is too slow", flush=True
            )
        try:
            found = module.measure(names)
        except (peers.PeerError, HeadraceError) as error:
            failures.append(f"{', '.join(names)}: {error}")
            continue
        for name in names:
            found[name].details["cores_of_others"] = round(busy, 2)
            report.write(name, found[name])
            measured[name] = found[name]
    return measured, failures


def committed(name: str) -> float | None:
    """The ratio of a row in the last commit; None without a repository, a committed result or a ratio."""
    command = ["git", "-C", str(REPOSITORY), "show", f"HEAD:benchmarks/results/{name}.json"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return None
    if result.returncode != 0:
        return None
    ratio = json.loads(result.stdout).get("ratio")
    return None if ratio is None else float(ratio)


def fallen(before: Mapping[str, float | None], now: Mapping[str, Row]) -> list[str]:
    """One line for each row whose ratio fell by more than FALL."""
    lines = []
    for name, row in now.items():
        old = before.get(name)
        if old is not None and row.ratio is not None and row.ratio < old * (1 - FALL):
            lines.append(f"{name}: ratio {row.ratio:.2f}, committed {old:.2f}")
    return lines


def table(rows: Mapping[str, Row]) -> Table:
    """What, headrace, peer, ratio, target, limit and the share of it."""
    result = Table(title=f"headrace on {report.cores()} cores, medians")
    result.add_column("what")
    for heading in ("headrace", "peer", "ratio", "target", "limit", "share"):
        result.add_column(heading, justify="right")
    for row in rows.values():
        peer = "" if row.peer is None else f"{number(row.peer)} {row.unit}\n{row.peer_name}"
        limit = "" if row.limit is None else f"{number(row.limit)} {row.unit}\n{row.limit_name}"
        result.add_row(
            row.what,
            f"{number(row.headrace)} {row.unit}",
            peer,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            _target(row),
            limit,
            "" if row.share is None else f"{row.share:.0%}",
        )
    return result


def number(value: float) -> str:
    """Three or more significant digits, without an exponent where one is not needed."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    text = f"{row.target:.2f} x" if row.peer is not None else f"{number(row.target)} {row.unit}"
    return f"{text}\n{'met' if row.met else 'missed'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, or the named rows. Returns the exit code."""
    rows = load()
    parser = argparse.ArgumentParser(prog="make bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which of {', '.join(rows)}; all by default")
    wanted = parser.parse_args(arguments).rows or list(rows)
    unknown = [name for name in wanted if name not in rows]
    if unknown:
        print(f"error: there is no row {unknown[0]}; there are {', '.join(rows)}", file=sys.stderr)
        return 2
    measured, failures = run(rows, list(dict.fromkeys(wanted)))
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    if measured:
        console.print(table(measured))
    results = {name: row for name in rows if (row := report.read(name)) is not None}
    print(f"plot: {plot.draw(results).relative_to(REPOSITORY)}")
    for line in fallen({name: committed(name) for name in measured}, measured):
        print(f"fell: {line}")
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
