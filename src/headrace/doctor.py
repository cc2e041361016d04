"""What this machine and this installation offer a run, what is missing, and how to mend it.

Invariants
* It reports; it prints nothing, changes nothing and uses no network.
* A broken or missing library is a finding, never an exception.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from headrace.models.resolve import aliases, cache_folder, cached_models
from headrace.state.machine import available_cores

_SHOWN = ("torch", "transformers")
"""Requirements that are always reported; the others only where something is wrong with them."""

_LOW_MEMORY = 4 << 30
_LOW_DISK = 2 << 30
_CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mend` says what to do where `ok` is false, or what could be had beside."""

    name: str
    value: str
    ok: bool = True
    mend: str | None = None


def report() -> list[Finding]:
    """Everything worth knowing, software first."""
    return [*_software(), *_extras(), *_compute(), *_memory(), *_cache()]


def _software() -> Iterator[Finding]:
    python_ok = sys.version_info >= (3, 11)
    yield Finding(
        "python", platform.python_version(), python_ok, None if python_ok else "use Python 3.11 or newer"
    )
    try:
        yield Finding("headrace", metadata.version("headrace"))
    except metadata.PackageNotFoundError:
        yield Finding("headrace", "not installed", False, "pip install -e . in the project's folder")
    for requirement in _requirements():
        finding = _requirement(requirement)
        if requirement.name in _SHOWN or not finding.ok:
            yield finding


def _requirements(extra: str | None = None) -> list[Requirement]:
    """What headrace, or one extra of it, needs here; nothing where headrace is not installed."""
    try:
        texts = metadata.requires("headrace") or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(text) for text in texts]
    if extra is None:
        return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [
        r
        for r in found
        if r.marker is not None
        and r.marker.evaluate({"extra": extra})
        and not r.marker.evaluate({"extra": ""})
    ]


def _requirement(requirement: Requirement) -> Finding:
    wanted = f"{requirement.name}{requirement.specifier}"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(requirement.name, "not installed", False, f'pip install "{wanted}"')
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, version)
    return Finding(
        requirement.name,
        f"{version}, but {requirement.specifier} is needed",
        False,
        f'pip install "{wanted}"',
    )


def _extras() -> Iterator[Finding]:
    try:
        extras = metadata.metadata("headrace").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return
    for extra in sorted(set(extras) - {"dev"}):
        missing = [r.name for r in _requirements(extra) if not _requirement(r).ok]
        if missing:
            yield Finding(
                f"extra {extra}", "not installed (optional)", mend=f'pip install "headrace[{extra}]"'
            )
        else:
            yield Finding(f"extra {extra}", "installed")


def _compute() -> Iterator[Finding]:
    cores = available_cores()
    yield Finding("cpu", f"{cores} cores, {_cpu_features()}")
    try:
        import torch
    # A broken binary library fails with OSError, a missing one with ImportError.
    except (ImportError, OSError) as error:
        yield Finding("device", f"torch does not load: {error}", False, "reinstall torch")
        return
    threads = torch.get_num_threads()
    limit = os.environ.get("OMP_NUM_THREADS")
    cause = f"unset OMP_NUM_THREADS (it is {limit})" if limit else "let the process use every core"
    yield Finding(
        "threads",
        f"{threads} of {cores} cores, kernels for {torch.backends.cpu.get_cpu_capability()}",
        threads == cores,
        None if threads == cores else f"{cause}, or set line.threads",
    )
    from headrace.kernels.library import find_compiler

    compiler = find_compiler()
    yield Finding(
        "native kernels",
        f"built on first use by {compiler}"
        if compiler
        else "none: PyTorch's operators generate, more slowly",
        mend=None if compiler else "install g++, or set CXX; int8 weights need it",
    )
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    yield Finding("devices", ", ".join(devices))


def _cpu_features() -> str:
    """Vector and matrix instructions as Linux names them; elsewhere the processor's family."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    flags = next((line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))), [])
    found = [feature for feature in _CPU_FEATURES if feature in flags]
    return " ".join([platform.machine(), *found])


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    enough = memory.available >= _LOW_MEMORY
    yield Finding(
        "memory",
        f"{_gib(memory.available)} free of {_gib(memory.total)}",
        enough,
        None
        if enough
        else "close other programs: training a 135M-parameter model in float32 takes about 4 GiB",
    )


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    yield Finding(
        "cache folder",
        str(folder),
        writable,
        None if writable else f"make {existing} writable, or set HEADRACE_CACHE to another folder",
    )
    models = cached_models()
    value = ", ".join(f"{model.source} ({model.bytes / 1e6:.0f} MB)" for model in models) or "none yet"
    absent = sorted(set(aliases()) - {model.source for model in models})
    yield Finding("cached models", value, mend=f"headrace pull {absent[0]}" if absent else None)
    free = shutil.disk_usage(existing).free
    yield Finding(
        "free disk",
        f"{_gib(free)} for the cache folder",
        free >= _LOW_DISK,
        None if free >= _LOW_DISK else "free some space, or set HEADRACE_CACHE to a folder on another disk",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
