"""What a row leaves behind: a `Row`, `results/ROW.json`, and facts about the machine it was measured on.

A module makes its rows with `against` (a peer), `within` (a bound) or `yardstick` (neither), so that "better" and
"met" mean the same in every row.

Invariants
* `ratio` says how many times better headrace is than what it is held against: more is better, whatever the unit.
* Nothing written here holds an absolute path.
* A result appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal, Self

import psutil

RESULTS = Path(__file__).resolve().parent / "results"

Better = Literal["higher", "lower"]

_ABSOLUTE = re.compile(r"(?:^|[\s='\"(:,])(?:/[\w.~-]+){2,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table.

    Args:
        what: what is measured, in one line.
        unit: of `headrace`, `peer` and `limit`, such as "tok/s", "s" or "MB".
        headrace: headrace's median.
        peer: the peer's median; None without a peer.
        peer_name: the peer and, where the best of several was taken, which.
        ratio: how many times better headrace is than the peer, or than the bound; None for a yardstick.
        target: the ratio to reach; without a peer the value in `unit` that must be kept to. None without one.
        met: whether the target is reached; None without a target.
        limit: what the machine allows at best, measured, in `unit`; None where there is no such limit.
        limit_name: what the limit is.
        share: the share of the limit that headrace reaches.
        details: every single measurement, settings, versions and the machine.
    """

    what: str
    unit: str
    headrace: float
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    limit: float | None = None
    limit_name: str | None = None
    share: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The row that `write` wrote.

        Raises:
            ValueError: it is not such a row.
        """
        if set(content) != {item.name for item in fields(cls)}:
            raise ValueError("not a row of this suite")
        return cls(**content)


def against(
    what: str,
    unit: str,
    *,
    headrace: float,
    peer: float,
    peer_name: str,
    target: float | None,
    better: Better = "higher",
    limit: float | None = None,
    limit_name: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> Row:
    """A row with a peer. `target` is the ratio that must be reached."""
    ratio = _ratio(headrace, peer, better)
    return Row(
        what=what,
        unit=unit,
        headrace=headrace,
        peer=peer,
        peer_name=peer_name,
        ratio=ratio,
        target=target,
        met=None if target is None else ratio >= target,
        limit=limit,
        limit_name=limit_name,
        share=None if limit is None else _ratio(headrace, limit, better),
        details=dict(details or {}),
    )


def within(
    what: str,
    unit: str,
    *,
    headrace: float,
    target: float,
    better: Better = "lower",
    limit: float | None = None,
    limit_name: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> Row:
    """A row without a peer. `target` is the value that must not be exceeded (or missed, if more is better).

    A value of 0 where less is better has no finite ratio: it is given as that of a millionth of the target.
    """
    value = max(headrace, target * 1e-6) if better == "lower" else headrace
    ratio = _ratio(value, target, better)
    return Row(
        what=what,
        unit=unit,
        headrace=headrace,
        ratio=ratio,
        target=target,
        met=ratio >= 1,
        limit=limit,
        limit_name=limit_name,
        share=None if limit is None else _ratio(value, limit, better),
        details=dict(details or {}),
    )


def yardstick(what: str, unit: str, *, value: float, details: Mapping[str, Any] | None = None) -> Row:
    """A row that only says what the machine can do."""
    return Row(what=what, unit=unit, headrace=value, details=dict(details or {}))


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median, and every single measurement in the order they were taken."""
    return {"median": median(values), "all": list(values)}


def core_numbers() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cores() -> int:
    """How many cores this process may use."""
    return len(core_numbers())


def busy_cores(seconds: float = 1.0) -> float:
    """Cores' worth of time that is taken now from the cores this process may use, while it sleeps itself."""

    def busy() -> float:
        times = psutil.cpu_times(percpu=True)
        return sum(sum(times[core]) - times[core].idle - times[core].iowait for core in core_numbers())

    before, started = busy(), time.perf_counter()
    time.sleep(seconds)
    return max(0.0, busy() - before) / (time.perf_counter() - started)


def machine() -> dict[str, Any]:
    """Cores this process may use, CPU model, memory in GB (2**30 bytes), and operating system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": cores(),
        "cpu": _cpu_model(),
        "memory_gb": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def write(name: str, row: Row) -> Path:
    """Write `results/NAME.json`, with the machine among the details.

    Raises:
        ValueError: the row holds an absolute path, or a number that is not finite.
    """
    content = asdict(row)
    content["details"].setdefault("machine", machine())
    for text in _texts(content):
        if _ABSOLUTE.search(text):
            raise ValueError(f"row {name} holds an absolute path: {text!r}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def read(name: str) -> Row | None:
    """The row that `results/NAME.json` holds; None if it is not there or of another form."""
    try:
        content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        return Row.from_json(content)
    except (FileNotFoundError, ValueError):
        return None


def _ratio(value: float, other: float, better: Better) -> float:
    return value / other if better == "higher" else other / value


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(content, Sequence):
        for value in content:
            yield from _texts(value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
