"""The one attention function that headrace registers with transformers, and the arithmetic behind it.

A model loaded with `attn_implementation="headrace"` calls `attention` in every layer. What it does depends on
the *backend* that is active: the engine's reads and writes KV slots, the trainer's knows packed groups.

Invariants
* A forward outside `attention_backend(...)` raises; nothing falls back to another kind of attention.
* transformers builds no mask for this implementation; the backend alone decides who sees whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headrace.errors import ModelError

ATTENTION = "headrace"
"""Name under which the function is registered."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What an architecture asks of one layer's attention.

    `sinks` is one learned logit per head, shape [H] (gpt-oss); `sliding_window` counts the tokens a query sees,
    itself included; `softcap` is c in c·tanh(x / c) (Gemma 2).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """query [H, N, D], key [Hkv, N, D], value [Hkv, N, Dv] -> [H, N, Dv], for one row of N tokens."""


_active: AttentionBackend | None = None


@contextmanager
def attention_backend(backend: AttentionBackend) -> Iterator[None]:
    """Let `backend` answer every attention call inside the block."""
    global _active
    previous, _active = _active, backend
    try:
        yield
    finally:
        _active = previous


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, N, D] -> ([1, N, H, Dv], None)."""
    if _active is None:
        raise RuntimeError("this model attends through headrace: call it inside attention_backend(...)")
    # No mask is built for this implementation: one that arrives is the architecture's own (Doge's dynamic mask).
    for added, name in ((position_bias, "bias"), (attention_mask, "mask")):
        if added is not None:
            raise ModelError(
                f"{type(module).__name__} adds a {name} of its own to its attention, "
                "which headrace does not support"
            )
    if not getattr(module, "is_causal", True):
        raise ModelError(
            f"{type(module).__name__} also attends to later tokens, as encoders do; "
            "headrace trains decoder-only language models"
        )
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    output = _active.attend(module.layer_idx, query[0], key[0], value[0], options)
    return output.transpose(0, 1).contiguous().unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Grouped-query attention over a batch.

    Args:
        query: [B, H, T, D]; key: [B, Hkv, L, D]; value: [B, Hkv, L, Dv], H a multiple of Hkv.
        mask: boolean, true where a query may look, broadcastable to [B, 1, T, L]; None lets all see all.

    Returns:
        [B, H, T, Dv].
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    groups = heads // kv_heads
    batch, _, length, dim = query.shape
    if options.softcap is None and options.sinks is None:
        if length == 1 and groups > 1:
            # One query per sequence: the heads that share a KV head become its rows, so K and V are not repeated.
            folded = query.reshape(batch, kv_heads, groups, dim)
            output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=options.scaling)
            return output.reshape(batch, heads, 1, value.shape[-1])
        return F.scaled_dot_product_attention(
            query,
            repeat_heads(key, groups),
            repeat_heads(value, groups),
            attn_mask=mask,
            scale=options.scaling,
        )
    scores = torch.matmul(query, repeat_heads(key, groups).transpose(-1, -2)) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).reshape(1, heads, 1, 1).expand(batch, heads, length, 1)
        probabilities = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    return torch.matmul(probabilities, repeat_heads(value, groups))


def repeat_heads(tensor: Tensor, groups: int) -> Tensor:
    """[B, Hkv, L, D] -> [B, Hkv·groups, L, D], each KV head repeated for the query heads that share it."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def visible(query_positions: Tensor, key_positions: Tensor, sliding_window: int | None) -> Tensor:
    """Boolean [..., T, L]: causal, and within the window when there is one."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    allowed = distance >= 0
    return allowed if sliding_window is None else allowed & (distance < sliding_window)
