"""Operations of training in native kernels: attention over packed rows, RMSNorm, SwiGLU, softmax. float32, CPU.

Invariant: each gives the values and gradients of its formula to within rounding, and the same bits for the same
number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.library import address, library


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "window")),
        ("scaling", ctypes.c_float),
    ]


class _Pair(ctypes.Structure):
    """`Piece` and `Segment` of source/training.h."""

    _fields_ = [("start", ctypes.c_int64), ("count", ctypes.c_int64)]


class _Strided(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("shape", _Shape),
        ("segments", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("segment", "piece")),
        *((name, _Strided) for name in ("query", "key", "value", "out")),
        ("log_sum", ctypes.c_void_p),
    ]


class PackedLayout:
    """Where the pieces of a packed row lie.

    Args:
        segments: per prompt, in the order of the row: the lengths of the prompt and of its responses.
    """

    def __init__(self, segments: Sequence[Sequence[int]]) -> None:
        pieces: list[tuple[int, int]] = []
        places: list[tuple[int, int]] = []
        start = 0
        for lengths in segments:
            places.append((len(pieces), len(lengths)))
            for length in lengths:
                pieces.append((start, length))
                start += length
        self.tokens = start
        self.segments = (_Pair * len(places))(*places)
        self.pieces = (_Pair * len(pieces))(*pieces)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float, window: int | None
) -> Tensor:
    """Causal attention in which a response sees its prompt and itself.

    Args:
        query: [H, N, D]; key, value: [Hkv, N, D], H a multiple of Hkv, D of 16.
        window: tokens that a query sees, itself included; None for all.

    Returns:
        [H, N, D].
    """
    return _PackedAttention.apply(query, key, value, layout, scaling, window or 0)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + ε) over the last dimension (arXiv 1910.07467)."""
    return _RMSNorm.apply(x, weight, epsilon)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate, up)


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """A linear layer's dL/dW = Gᵀ X: [M, N], [M, K] -> [N, K]."""
    gradient, x = gradient.contiguous(), x.contiguous()
    sizes = _sizes(len(x), gradient.shape[1], x.shape[1])
    out = x.new_empty(gradient.shape[1], x.shape[1])
    scratch = x.new_empty(library().headrace_weight_gradient_scratch(*sizes))
    library().headrace_weight_gradient(*_pointers(gradient, x), *sizes, *_pointers(out, scratch), _threads())
    return out


def log_sum_exp(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log Σ_v exp(logits_rv / temperature_r): [R, V], [R] -> [R]; NaN where a row is not finite. No gradient."""
    normalisers = torch.empty_like(temperatures)
    library().headrace_log_sum_exp(
        *_pointers(logits), *_sizes(*logits.shape), *_pointers(temperatures, normalisers), _threads()
    )
    return normalisers


def scaled_softmax(
    logits: Tensor, temperatures: Tensor, normalisers: Tensor, factors: Tensor, out: Tensor
) -> None:
    """out_rv = factor_r · exp(logits_rv / temperature_r − normaliser_r): [R, V]. `out` may be `logits`."""
    library().headrace_scaled_softmax(
        *_pointers(logits),
        *_sizes(*logits.shape),
        *_pointers(temperatures, normalisers, factors, out),
        _threads(),
    )


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float, window: int
    ) -> Tensor:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        heads, tokens, dim = query.shape
        out, log_sum = query.new_empty(tokens, heads, dim), query.new_empty(tokens, heads)
        ctx.layout, ctx.scaling, ctx.window = layout, scaling, window
        ctx.save_for_backward(query, key, value, out, log_sum)
        batch = _batch(query, key, value, out, log_sum, layout, scaling, window)
        library().headrace_packed_attention(ctypes.byref(batch), _threads())
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        # Token by token, as the projections that come next want them.
        dq, dk, dv = (t.new_empty(t.shape[1], t.shape[0], t.shape[2]) for t in (query, key, value))
        batch = _batch(query, key, value, out, log_sum, ctx.layout, ctx.scaling, ctx.window)
        gradients = [_strided(t) for t in (gradient, *(t.transpose(0, 1) for t in (dq, dk, dv)))]
        library().headrace_packed_attention_backward(
            ctypes.byref(batch), *(ctypes.byref(g) for g in gradients), _threads()
        )
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1), None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, inverses = torch.empty_like(rows), rows.new_empty(len(rows))
        library().headrace_rms_norm(
            *_pointers(rows, weight),
            *_sizes(*rows.shape),
            ctypes.c_float(epsilon),
            *_pointers(out, inverses),
            _threads(),
        )
        ctx.save_for_backward(rows, weight, inverses)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inverses = ctx.saved_tensors
        dx, up = torch.empty_like(rows), gradient.reshape(rows.shape).contiguous()
        parts = rows.new_zeros(torch.get_num_threads(), rows.shape[1])
        library().headrace_rms_norm_backward(
            *_pointers(rows, weight, up, inverses),
            *_sizes(*rows.shape),
            *_pointers(dx, parts),
            _threads(),
        )
        return dx.view(gradient.shape), parts.sum(0), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        library().headrace_swiglu(*_pointers(gate, up), *_sizes(gate.numel()), *_pointers(out), _threads())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        library().headrace_swiglu_backward(
            *_pointers(gate, up, gradient),
            *_sizes(gate.numel()),
            *_pointers(dgate, dup),
            _threads(),
        )
        return dgate, dup


def _batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    layout: PackedLayout,
    scaling: float,
    window: int,
) -> _Batch:
    heads, _, dim = query.shape
    return _Batch(
        _Shape(heads, len(key), dim, window, scaling),
        len(layout.segments),
        ctypes.addressof(layout.segments),
        ctypes.addressof(layout.pieces),
        *(_strided(t) for t in (query, key, value, out.transpose(0, 1))),
        address(log_sum),
    )


def _strided(tensor: Tensor) -> _Strided:
    """[heads, N, D] with its strides."""
    return _Strided(tensor.data_ptr(), tensor.stride(1), tensor.stride(0))


def _pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    """Where tensors lie. The caller holds them until the kernel has returned: a copy made in the call would be gone."""
    return tuple(ctypes.c_void_p(address(tensor.detach())) for tensor in tensors)


def _sizes(*sizes: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(size) for size in sizes)


def _threads() -> ctypes.c_int32:
    return ctypes.c_int32(torch.get_num_threads())
