"""The shared library: compiled once per machine with its own C++ compiler, cached, loaded on first use.

Invariants
* The cached file's name is a digest of the sources, the compiler, its flags and the CPU's features: a stale or
  foreign one is never loaded. It appears complete or not at all.
* Without a compiler nothing fails here: `available` is false, `unavailable_reason` says why, and callers use
  PyTorch's operators.
* The library runs on PyTorch's OpenMP threads; the number of threads is an argument of every call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch  # its OpenMP runtime must be in the process before the library asks for one
from filelock import FileLock, Timeout
from torch import Tensor

from headrace.state.files import cache_folder

_SOURCES = Path(__file__).parent / "source"
_FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp"),
    # Nobody reads errno or the floating-point flags. NaN and infinities keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
_NATIVE = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
}
_COMPILE_TIMEOUT_S = 300.0

_PROCEDURES = (
    *("forward", "linear", "column_peaks", "pack_float", "pack_int8", "sample"),
    *("packed_attention", "packed_attention_backward"),
    *("weight_gradient", "log_sum_exp", "scaled_softmax"),
    *("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward"),
)


class _Unavailable(Exception):
    """Why there is no library."""


def available() -> bool:
    """Whether the kernels can be used here; compiles them if that was not done yet."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Why the kernels cannot be used here, or None when they can."""
    outcome = _outcome()
    return outcome if isinstance(outcome, str) else None


def find_compiler() -> str | None:
    """The path of the compiler that the kernels are built with: `$CXX`, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        RuntimeError: it is not `available`.
    """
    outcome = _outcome()
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous CPU tensor lies; None for none."""
    if tensor is None:
        return None
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()


@cache
def _outcome() -> ctypes.CDLL | str:
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except _Unavailable as reason:
        return str(reason)
    except OSError as error:
        return f"the compiled kernels cannot be loaded: {error}"
    loaded.headrace_scratch.restype = loaded.headrace_weight_gradient_scratch.restype = ctypes.c_int64
    for name in _PROCEDURES:
        getattr(loaded, f"headrace_{name}").restype = None
    return loaded


def _compiled() -> Path:
    """The library's file, compiled first if it is not in the cache."""
    if platform.system() != "Linux":
        raise _Unavailable(f"native kernels are built for Linux only, not for {platform.system()}")
    compiler = find_compiler()
    if compiler is None:
        raise _Unavailable("there is no C++ compiler; install g++, or set CXX")
    flags = (*_FLAGS, *_NATIVE.get(platform.machine(), ()))
    folder = cache_folder() / "kernels"
    path = folder / f"{_digest(compiler, flags)}.so"
    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "compiling.lock", timeout=_COMPILE_TIMEOUT_S):
            if not path.is_file():
                _compile(compiler, flags, path)
    except Timeout:
        raise _Unavailable(
            f"another process has been compiling kernels for {_COMPILE_TIMEOUT_S:.0f} s"
        ) from None
    except OSError as error:
        raise _Unavailable(
            f"the cache {folder} cannot be written ({error.strerror}); set HEADRACE_CACHE"
        ) from None
    return path


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        subprocess.run(
            [compiler, *flags, str(_SOURCES / "kernels.cpp"), "-o", str(part)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        part.replace(path)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
        raise _Unavailable(f"{compiler} cannot compile the kernels: {first}") from None
    except subprocess.TimeoutExpired:
        raise _Unavailable(f"{compiler} did not compile the kernels in {_COMPILE_TIMEOUT_S:.0f} s") from None
    finally:
        part.unlink(missing_ok=True)


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    stat = os.stat(compiler)
    digest.update(repr((os.path.realpath(compiler), stat.st_size, stat.st_mtime_ns, flags)).encode())
    digest.update(_cpu_features().encode())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.lower().startswith(("flags", "features")):
            return line
    return platform.processor()
