"""Drawing tokens in two passes over the logits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.library import address, library

_SMALLEST = torch.finfo(torch.float32).tiny
"""Positive temperatures below it would become 0, which means greedy."""


def draw(
    logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token per row by inverting the cumulative distribution; see `engine/sampler.py` for what it promises.

    Args:
        logits: [R, V], float32, contiguous, on the CPU.
        temperatures: R; 0 takes the most likely token and reports its log-prob at temperature 1.
        uniforms: R, in [0, 1).

    Returns:
        The ids and their log-probs; NaN where a row's logits hold NaN or +inf.
    """
    rows, vocabulary = logits.shape
    ids = (ctypes.c_int64 * rows)()
    logprobs = (ctypes.c_double * rows)()
    library().headrace_sample(
        ctypes.c_void_p(address(logits)),
        ctypes.c_int64(rows),
        ctypes.c_int64(vocabulary),
        (ctypes.c_float * rows)(*(max(t, _SMALLEST) if t > 0 else 0.0 for t in temperatures)),
        (ctypes.c_double * rows)(*uniforms),
        ids,
        logprobs,
        ctypes.c_int32(torch.get_num_threads()),
    )
    return list(ids), list(logprobs)
