"""`headrace train` as a measured process: its metrics, and the peak memory of a process and its children.

Invariants
* A run is a process of its own, with every core, in a folder that the caller throws away.
* Peak memory is counted the same way whatever the process is: the kernel's own peak of each live process,
  summed over the process and its descendants.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks import peers, report

ADDITION = peers.BENCHMARKS.parent / "examples" / "addition.toml"
"""The task that most rows train on."""

SMALL = f"""
[model]
name = "tiny-random"

[environment]
name = "{peers.BENCHMARKS / "letters.py"}:Letters"

[sampling]
max_tokens = 64

[trainer]
learning_rate = 1e-4
"""
"""A task for what does not depend on the model: steps take a fraction of a second."""

INT8 = ("engine.weight_format=int8", "algorithm.ratio=proximal")
"""Overrides for quantised rollouts: the loss then corrects for the generator's policy being another one."""

KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 1 << 32), ("trim_threshold", 1 << 34), ("top_pad", 1 << 26))
)
"""GLIBC_TUNABLES with which a peer keeps its memory between steps, as headrace makes glibc do for itself: TRL takes
a third less time with it and with its best micro-batch."""

START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
WATCH_EVERY_S = 0.2
STOP_TIMEOUT_S = 30.0


def program() -> str:
    """The `headrace` command of this environment."""
    return str(Path(sys.executable).with_name("headrace"))


def threads() -> dict[str, str]:
    """What makes a process compute with every core."""
    return {"OMP_NUM_THREADS": str(report.cores())}


def small_config(folder: Path, more: str = "") -> Path:
    """`SMALL` as a settings file in `folder`, followed by `more` sections."""
    config = folder / "small.toml"
    config.write_text(SMALL + more, encoding="utf-8")
    return config


def train(
    config: Path,
    folder: Path,
    *,
    steps: int,
    overrides: Iterable[str] = (),
    what: str = "headrace",
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Train without evaluation in a process of its own.

    Args:
        config: the settings file.
        folder: the run's folder, which must not exist.
        steps: optimizer steps.
        overrides: further `section.key=value` settings.
        what: names the run in errors.
        environment: variables set on top of this process's own.

    Returns:
        The lines of `metrics.jsonl`, one per step.

    Raises:
        PeerError: the run failed or took too long.
    """
    command = [program(), "train", str(config), "--run-dir", str(folder)]
    for override in ("eval.tasks=0", f"line.steps={steps}", *overrides):
        command += ["--set", override]
    limit_s = START_TIMEOUT_S + steps * STEP_TIMEOUT_S
    peers.run(command, what=what, timeout_s=limit_s, environment=threads() | dict(environment or {}))
    metrics = read_lines(folder / "metrics.jsonl")
    if len(metrics) != steps:
        raise peers.PeerError(f"{what}: {len(metrics)} steps instead of {steps}")
    return metrics


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def total(metrics: Sequence[Mapping[str, Any]], *names: str) -> float:
    """The sum of some numbers over all steps."""
    return float(sum(step[name] for step in metrics for name in names))


class PeakMemory:
    """The peak resident memory, in MB (2**20 bytes), of the processes that are started inside the block.

    `megabytes` is the largest sum, over the descendants of this process that were alive together, of the peak
    that the kernel keeps for each (VmHWM). Those that ran before the block are left out.
    """

    def __init__(self) -> None:
        self.megabytes = 0.0
        self._process = psutil.Process()
        self._before: set[int] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._before = {child.pid for child in self._process.children(recursive=True)}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._done.wait(WATCH_EVERY_S):
            children = self._process.children(recursive=True)
            started = [child.pid for child in children if child.pid not in self._before]
            self.megabytes = max(self.megabytes, sum(map(peak_mb, started)))


def peak_mb(pid: int) -> float:
    """A process's peak resident memory in MB; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(sizes[0]) / 1024 if sizes else 0.0
