"""Log-probabilities of sampled tokens through a packed forward.

Invariants
* A log-prob is log-softmax(logits / temperature) at the sampled id, in float32, or float64 when logits are.
* Logits are the largest tensor of a training step: they exist once, and their gradient takes their place where it
  can; everything else is computed in slices of rows.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace import kernels
from headrace.trainer.attention import packed_attention
from headrace.trainer.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLICE_ROWS = 64
"""Rows of logits handled at a time, so that temporaries stay in the cache."""


def packed_logprobs(module: PreTrainedModel, batch: MicroBatch) -> Tensor:
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
        # Squeezed, not indexed: the way back is then a view and not a copy.
        output = module(**inputs).logits
    logits = output.squeeze(0)
    if not keeps:
        logits = logits.index_select(0, batch.logit_positions)
    # A linear layer does not look at its output again, so the gradient may take its memory.
    reusable = keeps and type(output.grad_fn).__name__ == "_ProductBackward"
    return selected_logprobs(logits, batch.rows, batch.targets, batch.temperatures, reusable)


def selected_logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor, reusable: bool = False
) -> Tensor:
    """log-softmax(logits[rows] / temperatures[rows])[targets], without making the log-softmax.

    Args:
        logits: [R, V]; rows, targets: [T], indices of a row and of an id; temperatures: [R].
        reusable: nobody reads `logits` after this, so that `backward` may write their gradient over them. It can
            then be called once.

    Returns:
        [T], float32, or float64 when `logits` are.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    temperatures = temperatures.to(dtype).to(logits.device)
    selected: Tensor = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, rows, targets, temperatures, reusable
    )
    return selected


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor, reusable: bool
    ) -> Tensor:
        logits = logits.contiguous()
        ctx.reusable = reusable
        normalisers = _normalisers(logits, temperatures)
        ctx.save_for_backward(logits, rows, targets, temperatures, normalisers)
        return logits[rows, targets].to(temperatures.dtype) / temperatures[rows] - normalisers[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """d logp_t / d logits_rv = (1[v = y_t] − softmax_rv) / temperature_r for t's row r."""
        logits, rows, targets, temperatures, normalisers = ctx.saved_tensors
        scaled_gradient = gradient / temperatures[rows]
        per_row = torch.zeros_like(temperatures).index_add(0, rows, scaled_gradient)
        out = logits.detach() if ctx.reusable else torch.empty_like(logits)
        _scaled_softmax(logits, temperatures, normalisers, -per_row, out)
        out.index_put_((rows, targets), scaled_gradient.to(out.dtype), accumulate=True)
        return out, None, None, None, None


def _normalisers(logits: Tensor, temperatures: Tensor) -> Tensor:
    """[R], log Σ_v exp(logits / temperature)."""
    if kernels.suits(logits):
        return kernels.log_sum_exp(logits, temperatures)
    normalisers = torch.empty_like(temperatures)
    for part in _slices(len(logits)):
        scaled = logits[part].to(temperatures.dtype) / temperatures[part, None]
        normalisers[part] = torch.logsumexp(scaled, dim=-1)
    return normalisers


def _scaled_softmax(
    logits: Tensor, temperatures: Tensor, normalisers: Tensor, factors: Tensor, out: Tensor
) -> None:
    """out [R, V] = factor · softmax(logits / temperature); `out` may be `logits`."""
    if kernels.suits(logits):
        kernels.scaled_softmax(logits, temperatures, normalisers, factors, out)
        return
    for part in _slices(len(logits)):
        scaled = logits[part].to(temperatures.dtype) / temperatures[part, None]
        out[part] = scaled.sub_(normalisers[part, None]).exp_().mul_(factors[part, None])


def _slices(rows: int) -> list[slice]:
    return [slice(start, start + SLICE_ROWS) for start in range(0, rows, SLICE_ROWS)]
