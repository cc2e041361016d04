"""A 128-bit name of bytes, at the speed of memory: the same with and without the native kernels.

Bytes are cut into stripes of 4096. A stripe is 512 words of 64 bits (little-endian, the last one filled up with zeros);
each is folded, multiplied by an odd constant of its place in the stripe and added up modulo 2**64. The sums and the
length go through blake2b.

Invariants
* One changed word always changes its stripe's sum: folding and multiplying by an odd number lose nothing.
* It guards against accidents and not against forgery: whoever wants to can make two buffers of one sum.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.library import available, library

STRIPE = 4096
"""Bytes that one sum stands for."""

_WORDS = STRIPE // 8
_PIECE = 64 * STRIPE
"""Bytes that numpy handles at a time, so that temporaries stay in the cache."""


def fingerprint(buffer: Tensor | memoryview | bytes | bytearray, context: bytes = b"") -> str:
    """The 128-bit fingerprint of a buffer's bytes, as 32 hex digits.

    Args:
        buffer: a contiguous tensor (copied first where it is not on the CPU), or anything with a contiguous buffer.
        context: what else the name stands for; another context gives another name.
    """
    flat = flat_bytes(buffer)
    return digest_of_sums(stripe_sums(flat), flat.size, context).hex()


def digest_of_sums(sums: np.ndarray, size: int, context: bytes = b"") -> bytes:
    """The fingerprint (16 bytes) of a buffer of `size` bytes whose stripes have these sums."""
    digest = hashlib.blake2b(f"{size} {len(context)} ".encode() + context, digest_size=16)
    digest.update(np.ascontiguousarray(sums, dtype="<u8").tobytes())
    return digest.digest()


def stripes(size: int) -> int:
    """How many sums `size` bytes have."""
    return -(-size // STRIPE)


def stripe_sums(flat: np.ndarray) -> np.ndarray:
    """The sums [stripes], uint64, of bytes [size], uint8, contiguous."""
    if not flat.size or not available():
        return plain_stripe_sums(flat)
    sums = np.empty(stripes(flat.size), dtype=np.uint64)
    library().headrace_stripe_sums(
        ctypes.c_void_p(flat.ctypes.data),
        ctypes.c_int64(flat.size),
        ctypes.c_void_p(constants().ctypes.data),
        ctypes.c_void_p(sums.ctypes.data),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return sums


def plain_stripe_sums(flat: np.ndarray) -> np.ndarray:
    """`stripe_sums` without the native kernels."""
    parts = [_piece_sums(flat[start : start + _PIECE]) for start in range(0, flat.size, _PIECE)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _piece_sums(piece: np.ndarray) -> np.ndarray:
    padded = stripes(piece.size) * STRIPE
    if padded != piece.size or piece.ctypes.data % 8:
        whole = np.zeros(padded, dtype=np.uint8)
        whole[: piece.size] = piece
        piece = whole
    words = piece.view("<u8").reshape(-1, _WORDS)
    mixed: np.ndarray = words ^ (words >> np.uint64(32))
    mixed *= constants()
    return mixed.sum(axis=1, dtype=np.uint64)


def flat_bytes(buffer: Tensor | memoryview | bytes | bytearray) -> np.ndarray:
    """The bytes [size], uint8, of a buffer; a view where that is possible.

    Raises:
        ValueError: a tensor or memoryview that is not contiguous.
    """
    if isinstance(buffer, Tensor):
        if not buffer.is_contiguous():
            raise ValueError("a fingerprint needs a contiguous tensor; call .contiguous() first")
        if not buffer.numel():
            return np.empty(0, dtype=np.uint8)
        return buffer.detach().cpu().view(-1).view(torch.uint8).numpy()
    view = memoryview(buffer)
    if not view.nbytes:
        return np.empty(0, dtype=np.uint8)
    if not view.c_contiguous:
        raise ValueError("a fingerprint needs a contiguous buffer")
    return np.frombuffer(view.cast("B"), dtype=np.uint8)


@cache
def constants() -> np.ndarray:
    """The odd constants [512], uint64, of a stripe's words: splitmix64 from 1 on, made odd."""
    state = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
