"""What this process takes, what the machine lets it have, and how its libraries keep memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path

import psutil

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 32 << 20
_KEEP_BYTES = 1 << 30


_PRODUCTS_KEPT = "64"
"""Compiled matrix products that oneDNN keeps. It makes one per shape, and every packed row has another length."""


def tune_allocator() -> None:
    """Let glibc keep blocks of up to 32 MB instead of giving each one back and faulting it in again.

    Larger ones stay outside the heap: kept in it they would tear holes that nothing fits, and memory would grow.
    oneDNN keeps few of its kernels: with its default of 1024 they alone take hundreds of MB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRODUCTS_KEPT)
    with contextlib.suppress(OSError, AttributeError):  # another C library: its defaults stay
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def resident_mb() -> float:
    """Resident memory of this process in MB (2**20 bytes)."""
    return psutil.Process().memory_info().rss / 2**20


def available_mb() -> float:
    """Memory that can be had without swapping, in MB."""
    return psutil.virtual_memory().available / 2**20


def cpu_seconds_of_others() -> float:
    """CPU seconds that other processes have used on this process's cores since the machine started."""
    times = psutil.cpu_times(percpu=True)
    used = [times[core] for core in core_numbers() if core < len(times)]
    own = psutil.Process().cpu_times()
    return sum(core.user + core.nice + core.system for core in used) - own.user - own.system


def available_cores() -> int:
    """CPU cores that this process may use: its affinity, and a container's quota."""
    return max(1, min(len(core_numbers()), _quota_cores(Path("/sys/fs/cgroup/cpu.max"))))


def core_numbers() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota_cores(file: Path) -> int:
    """Cores' worth of time that a control group allows (cgroup v2's `cpu.max`: quota and period, or "max")."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or no limit
        return 1 << 30
