"""Log-probabilities of sampled tokens through a packed forward.

Invariants
* A log-prob is log-softmax(logits / temperature) at the sampled id, in float32, or float64 when logits are.
* Logits are the largest tensor of a training step: they exist once, and their gradient once; everything else
  is computed in slices of rows.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from headrace import kernels
from headrace.trainer.attention import packed_attention
from headrace.trainer.packing import MicroBatch

SLICE_ROWS = 64
"""Rows of logits handled at a time, so that temporaries stay in the cache."""


def packed_logprobs(module: nn.Module, batch: MicroBatch) -> Tensor:
    """[T], the module's log-prob of each sampled token of `batch`, differentiable."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
    if keeps:
        inputs["logits_to_keep"] = batch.logit_positions
    with packed_attention(module, batch.attention):
        logits = module(**inputs).logits[0]
    if not keeps:
        logits = logits.index_select(0, batch.logit_positions)
    return selected_logprobs(logits, batch.rows, batch.targets, batch.temperatures)


def selected_logprobs(logits: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """log-softmax(logits[rows] / temperatures[rows])[targets], without making the log-softmax.

    Args:
        logits: [R, V]; rows, targets: [T], indices of a row and of an id; temperatures: [R].

    Returns:
        [T], float32, or float64 when `logits` are.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return _SelectedLogprobs.apply(logits, rows, targets, temperatures.to(dtype).to(logits.device))


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        logits = logits.contiguous()
        normalisers = _normalisers(logits, temperatures)
        ctx.save_for_backward(logits, rows, targets, temperatures, normalisers)
        return logits[rows, targets].to(temperatures.dtype) / temperatures[rows] - normalisers[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """d logp_t / d logits_rv = (1[v = y_t] − softmax_rv) / temperature_r for t's row r."""
        logits, rows, targets, temperatures, normalisers = ctx.saved_tensors
        scaled_gradient = gradient / temperatures[rows]
        per_row = torch.zeros_like(temperatures).index_add(0, rows, scaled_gradient)
        result = _scaled_softmax(logits, temperatures, normalisers, -per_row)
        result.index_put_((rows, targets), scaled_gradient.to(result.dtype), accumulate=True)
        return result, None, None, None


def _normalisers(logits: Tensor, temperatures: Tensor) -> Tensor:
    """[R], log Σ_v exp(logits / temperature)."""
    if _native(logits):
        return kernels.log_sum_exp(logits, temperatures)
    normalisers = torch.empty_like(temperatures)
    for part in _slices(len(logits)):
        scaled = logits[part].to(temperatures.dtype) / temperatures[part, None]
        normalisers[part] = torch.logsumexp(scaled, dim=-1)
    return normalisers


def _scaled_softmax(logits: Tensor, temperatures: Tensor, normalisers: Tensor, factors: Tensor) -> Tensor:
    """[R, V], factor · softmax(logits / temperature)."""
    if _native(logits):
        return kernels.scaled_softmax(logits, temperatures, normalisers, factors)
    result = torch.empty_like(logits)
    for part in _slices(len(logits)):
        scaled = logits[part].to(temperatures.dtype) / temperatures[part, None]
        result[part] = scaled.sub_(normalisers[part, None]).exp_().mul_(factors[part, None])
    return result


def _native(logits: Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and kernels.available()


def _slices(rows: int) -> list[slice]:
    return [slice(start, start + SLICE_ROWS) for start in range(0, rows, SLICE_ROWS)]
