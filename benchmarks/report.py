"""What a row leaves behind: `results/ROW.json`, and facts about the machine it was measured on.

Invariant: nothing written here names a host, a user or a path.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Cores this process may use, CPU model, memory in GB (2**30 bytes), and operating system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": cores(),
        "cpu": _cpu_model(),
        "memory_gb": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def write(row: str, result: Mapping[str, Any]) -> Path:
    """Write `results/ROW.json`, whole or not at all. `result` holds at least `ratio`."""
    if "ratio" not in result:
        raise ValueError("a row's result needs a ratio")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{row}.json"
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
