"""The shared library: compiled once per machine with its own C++ compiler, cached, loaded on first use.

Invariants
* The cached file's name is a digest of the sources, the compiler, its flags and the CPU's features: a stale or
  foreign one is never loaded. Its checksum lies beside it: one that was damaged is built again.
* Without a compiler nothing fails here: `available` is false, `unavailable_reason` says why, and callers use
  PyTorch's operators.
* The library runs on PyTorch's OpenMP threads; the number of threads is an argument of every call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch  # its OpenMP runtime must be in the process before the library asks for one
from torch import Tensor

from headrace.files import TEMPORARY_PREFIX, cache_folder, write_atomic
from headrace.locks import locked

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

_SIZES = ("scratch", "weight_gradient_scratch")

_PROCEDURES = (
    *("forward", "linear", "column_peaks", "pack_float", "pack_int8", "sample"),
    *("packed_attention", "packed_attention_backward"),
    *("weight_gradient", "log_sum_exp", "scaled_softmax"),
    *("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward"),
    *("stripe_sums", "load_blocks", "store_blocks"),
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


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels can compute on these: float32 on the CPU, where there are kernels."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors) and available()


def kernel_fingerprint() -> str:
    """What computes here: instruction set, PyTorch, and the build of these kernels. Where it differs, so may bits."""
    outcome = _outcome()
    own = "none" if isinstance(outcome, str) else Path(outcome._name).stem
    return f"{torch.backends.cpu.get_cpu_capability()} torch-{torch.__version__} kernels-{own}"


def find_compiler() -> str | None:
    """The path of the compiler that the kernels are built with, `$CXX` or g++; None if it is not there."""
    return shutil.which(_compiler_command()[0])


def _compiler_command() -> list[str]:
    """`$CXX`, which may hold flags too, else g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


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
        for name in _SIZES:
            getattr(loaded, f"headrace_{name}").restype = ctypes.c_int64
        for name in _PROCEDURES:
            getattr(loaded, f"headrace_{name}").restype = None
    except _Unavailable as reason:
        return str(reason)
    except (OSError, AttributeError) as error:
        return f"the compiled kernels cannot be loaded: {error}"
    return loaded


def _compiled() -> Path:
    """The library's file, compiled first if it is not in the cache."""
    if platform.system() != "Linux":
        raise _Unavailable(f"native kernels are built for Linux only, not for {platform.system()}")
    command = _compiler_command()
    if find_compiler() is None:
        raise _Unavailable(f"there is no C++ compiler {command[0]!r}; install g++, or set CXX")
    flags = (*command[1:], *_FLAGS, *_NATIVE.get(platform.machine(), ()))
    folder = cache_folder() / "kernels"
    path = folder / f"{_digest(command[0], flags)}.so"
    if _intact(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "compiling.lock", timeout_s=_COMPILE_TIMEOUT_S):
            if not _intact(path):
                _compile(command[0], flags, path)
    except TimeoutError:
        raise _Unavailable(
            f"another process has been compiling kernels for {_COMPILE_TIMEOUT_S:.0f} s"
        ) from None
    except OSError as error:
        raise _Unavailable(
            f"the cache {folder} cannot be written ({error.strerror}); set HEADRACE_CACHE"
        ) from None
    return path


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Build the library; it and its checksum appear complete or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=TEMPORARY_PREFIX) as scratch:
        built = Path(scratch) / path.name
        try:
            result = subprocess.run(
                [compiler, *flags, str(_SOURCES / "kernels.cpp"), "-o", str(built)],
                check=False,
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise _Unavailable(
                f"{compiler} did not compile the kernels in {_COMPILE_TIMEOUT_S:.0f} s"
            ) from None
        except OSError as error:
            raise _Unavailable(f"{compiler} cannot be run: {error.strerror}") from None
        if result.returncode < 0:
            raise _Unavailable(f"{compiler} was killed by signal {-result.returncode} (too little memory?)")
        if result.returncode or not built.is_file():
            first = next((line for line in result.stderr.splitlines() if "error" in line), "it says nothing")
            raise _Unavailable(f"{compiler} cannot compile the kernels: {first}")
        content = built.read_bytes()
    write_atomic(path, content)
    write_atomic(_checksum_file(path), _checksum(content).encode())


def _intact(path: Path) -> bool:
    """Whether the library is there as it was built: a damaged one would end the process when it is loaded."""
    try:
        return _checksum_file(path).read_text(encoding="utf-8") == _checksum(path.read_bytes())
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    path = shutil.which(compiler) or compiler
    stat = os.stat(path)
    digest.update(repr((os.path.realpath(path), stat.st_size, stat.st_mtime_ns, flags)).encode())
    digest.update(_cpu_features().encode())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.lower().startswith(("flags", "features")):
            return line
    return platform.processor()
