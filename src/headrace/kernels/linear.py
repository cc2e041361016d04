"""Linear layers packed for the kernels, in float32 or int8.

Several layers over one input are packed as one. int8 follows SmoothQuant (arXiv 2211.10438): input channels with
large values are scaled down and their weights up before both are rounded; weights have one scale per output,
inputs one per row, taken when the row is there.

Invariants
* Until the next change of the layers' parameters, a packed weight computes them to within rounding: that of
  float32, or that of int8.
* A row's result does not depend on the other rows nor on the number of threads, in any bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headrace.kernels.library import address, library
from headrace.kernels.memory import HugePages

_SMALLEST = 1e-5
"""Peaks below this count as this: a channel that never speaks needs no smoothing."""


class Linear(NamedTuple):
    """What packing takes of an `nn.Linear`: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]


class LinearStruct(ctypes.Structure):
    """`Linear` of source/gemm.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale", "smooth")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
    ]


class PackedWeight:
    """Linear layers [out_i, in] over one input, as one layer [Σ out_i, in]. float32 on the CPU, no gradient.

    Args:
        linears: all with a bias or all without.
        input_peaks: [in], the largest magnitude of each input channel; given, the layer is int8.
        memory: where the weights go; memory of its own by default.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear | Linear],
        input_peaks: Tensor | None = None,
        memory: HugePages | None = None,
    ) -> None:
        self.linears = list(linears)
        self.input_peaks = input_peaks
        self.inputs = linears[0].in_features
        self.outputs = sum(linear.out_features for linear in linears)
        columns = library().headrace_tile_columns()
        panels = -(-self.outputs // columns)
        int8 = input_peaks is not None
        depth = self._padded_inputs if int8 else self.inputs
        allocate = memory.empty if memory else _empty
        self.weight = allocate(panels * depth * columns, torch.uint8 if int8 else torch.float32)
        # Panels are padded with zeros, which int8 writes as 128.
        self.weight.fill_(128 if int8 else 0)
        self.scale = torch.ones(self.outputs) if int8 else None
        self.smooth = torch.ones(self.inputs) if int8 else None
        self.bias: Tensor | None = None
        self.repack()

    @property
    def _padded_inputs(self) -> int:
        """int8 multiplies four inputs at a time."""
        return -(-self.inputs // 4) * 4

    @torch.no_grad()
    def repack(self) -> None:
        """Take the layers' parameters as they are now."""
        weights = [linear.weight.detach() for linear in self.linears]
        if self.input_peaks is not None:
            assert self.smooth is not None
            self.smooth.copy_(input_smoothing(self.input_peaks, weights))
        if self.linears[0].bias is not None:
            self.bias = torch.cat([linear.bias.detach() for linear in self.linears])
        column = 0
        for weight in weights:
            shape = (ctypes.c_int64(len(weight)), ctypes.c_int64(self.inputs), ctypes.c_int64(column))
            source, threads = ctypes.c_void_p(address(weight)), ctypes.c_int32(torch.get_num_threads())
            packed = ctypes.c_void_p(address(self.weight))
            if self.scale is None:
                library().headrace_pack_float(source, *shape, packed, threads)
            else:
                smooth, scale = ctypes.c_void_p(address(self.smooth)), ctypes.c_void_p(address(self.scale))
                library().headrace_pack_int8(source, *shape, smooth, packed, scale, threads)
            column += len(weight)

    def struct(self) -> LinearStruct:
        """The layer as the kernels take it; valid until the next `repack` and as long as this object lives."""
        pointers = (address(t) for t in (self.weight, self.bias, self.scale, self.smooth))
        return LinearStruct(*pointers, self.outputs, self.inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., Σ out_i]."""
        rows = x.reshape(-1, self.inputs).contiguous()
        out = torch.empty(len(rows), self.outputs)
        quantised = torch.empty(len(rows), self._padded_inputs, dtype=torch.int8)
        scales, sums = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int32)
        library().headrace_linear(
            ctypes.byref(self.struct()),
            ctypes.c_void_p(address(rows)),
            ctypes.c_int64(len(rows)),
            *(ctypes.c_void_p(address(t)) for t in (out, quantised, scales, sums)),
            ctypes.c_int32(torch.get_num_threads()),
        )
        return out.reshape(*x.shape[:-1], self.outputs)


def _empty(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)


def input_smoothing(input_peaks: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What each input channel is multiplied by before it is rounded: 1 / s, s = sqrt(max|X_j| / max|W_j|).

    SmoothQuant's equation 4 (arXiv 2211.10438) with α = 0.5.

    Args:
        input_peaks: [in], max|X_j|.
        weights: each [out_i, in]; max|W_j| is taken over all of them.

    Returns:
        [in]; the weights are divided by it.
    """
    peaks = torch.zeros_like(input_peaks)
    for weight in weights:
        library().headrace_column_peaks(
            ctypes.c_void_p(address(weight)),
            ctypes.c_int64(len(weight)),
            ctypes.c_int64(len(peaks)),
            ctypes.c_void_p(address(peaks)),
            ctypes.c_int32(torch.get_num_threads()),
        )
    # A weight that is not finite must break its own outputs, not the smoothing of all.
    peaks = torch.nan_to_num(peaks, posinf=1.0)
    return (peaks.clamp(min=_SMALLEST) / input_peaks.clamp(min=_SMALLEST)).sqrt()
