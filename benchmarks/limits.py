"""Rows `gemm_peak` and `bandwidth`: what the machine allows at best. Other rows are held against them.

Invariants
* They are measured, once per suite run, when the first row asks for them, in a process of their own.
* Each is the best of several ways, and a way's rate is the median of its windows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from benchmarks import peers, report
from benchmarks.report import Row

ROWS = ("gemm_peak", "bandwidth")

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates in units per second.

    Args:
        gemm: float operations of float32 matrix products.
        gemm_int8: integer operations of int8 matrix products.
        bandwidth: bytes read from memory.
        details: for each of the three, the best way and the rates of all of them.
    """

    gemm: float
    gemm_int8: float
    bandwidth: float
    details: dict[str, Any]


@cache
def measured() -> Limits:
    """This machine's limits.

    Raises:
        PeerError: they cannot be measured.
    """
    print("measuring the machine's limits", flush=True)
    command = [sys.executable, str(peers.SCRIPTS / "machine_limits.py")]
    settings = {"threads": report.cores()}
    with peers.Worker("the machine's limits", command, settings, start_timeout_s=TIMEOUT_S) as worker:
        found = {
            name: best(worker.ask({"measure": name}, timeout_s=TIMEOUT_S))
            for name in ("gemm_float32", "gemm_int8", "bandwidth")
        }
    return Limits(
        gemm=found["gemm_float32"]["median"],
        gemm_int8=found["gemm_int8"]["median"],
        bandwidth=found["bandwidth"]["median"],
        details=found,
    )


def best(ways: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The way whose median rate is the highest, and everything that was measured."""
    name = max(ways, key=lambda way: median(ways[way]))
    return {"best": name, "median": median(ways[name]), "ways": {way: list(ways[way]) for way in ways}}


def measure(rows: Sequence[str]) -> dict[str, Row]:
    """The wanted rows of ROWS."""
    limits = measured()
    made = {
        "gemm_peak": report.yardstick(
            "matrix products, float32",
            "GFLOP/s",
            value=limits.gemm / 1e9,
            details={
                "float32": limits.details["gemm_float32"],
                "int8": limits.details["gemm_int8"],
                "unit_of_details": "operations per second",
            },
        ),
        "bandwidth": report.yardstick(
            "reading memory",
            "GB/s",
            value=limits.bandwidth / 1e9,
            details=limits.details["bandwidth"] | {"unit_of_details": "bytes per second"},
        ),
    }
    return {name: made[name] for name in rows}
