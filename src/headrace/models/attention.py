"""The one attention function that headrace registers with transformers, and the arithmetic behind it.

A model loaded with `attn_implementation="headrace"` calls `attention` in every layer. What it does depends on
the *backend* that is active: the engine's reads and writes KV slots, the trainer's knows packed groups.

Invariants
* A forward outside `attention_backend(...)` raises; nothing falls back to another kind of attention.
* transformers builds no mask for this implementation; the backend alone decides who sees whom.
* Where an indexer selects keys (`models/indexer.py`), the same backend makes the selection and applies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from headrace.errors import ModelError

ATTENTION = "headrace"
"""Name under which the function is registered."""


_PLACEHOLDER = torch.zeros(1, 1, 1, 1)
"""What architectures get that cut the mask to pieces before they attend; nobody reads its values."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The keys that each query of a layer attends to, as the backend's `select` found them.

    `masks` are boolean, one for each block in which the backend computes, true where a query may look; None
    where all queries of a block see everything that comes before them.
    """

    masks: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What an architecture asks of one layer's attention.

    `sinks` is one learned logit per head, shape [H] (gpt-oss); `sliding_window` counts the tokens a query sees,
    itself included; `softcap` is c in c·tanh(x / c) (Gemma 2); `selection` is what an indexer chose, in this layer
    or in an earlier one that shares it.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    selection: Selection | None = None


class AttentionBackend(Protocol):
    def select(self, layer: int, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> Selection:
        """The `top_k` best keys (see `best_keys`) of each of a row's N tokens.

        query [H, N, D], key [1, N, D], weights [H, N, 1] of the layer's indexer. Comes before the layer's `attend`.
        """

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
    indices: Selection | Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, N, D] -> ([1, N, H, Dv], None)."""
    backend = _backend()
    if attention_mask is _PLACEHOLDER:
        attention_mask = None
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
    if indices is not None and not isinstance(indices, Selection):
        raise ModelError(
            f"{type(module).__name__} selects keys in a way of its own, which headrace does not support"
        )
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        selection=indices,
    )
    output = backend.attend(module.layer_idx, query.squeeze(0), key.squeeze(0), value.squeeze(0), options)
    return output.transpose(0, 1).contiguous().unsqueeze(0), None


def select(layer: int, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> Selection:
    """`AttentionBackend.select` of the active backend."""
    return _backend().select(layer, query, key, weights, top_k)


def _backend() -> AttentionBackend:
    if _active is None:
        raise RuntimeError("this model attends through headrace: call it inside attention_backend(...)")
    return _active


def _mask(*, config: PreTrainedConfig, **_: Any) -> Tensor | None:
    """transformers' mask interface."""
    return _PLACEHOLDER if "indexed_attention" in (getattr(config, "layer_types", None) or ()) else None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _mask)


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


def narrowed(mask: Tensor | None, selected: Tensor | None) -> Tensor | None:
    """What two masks both allow; None allows all."""
    if mask is None or selected is None:
        return selected if mask is None else mask
    return mask & selected


def best_keys(query: Tensor, key: Tensor, weights: Tensor, mask: Tensor | None, top_k: int) -> Tensor | None:
    """Whether each key is among the `top_k` best of those that a query may see.

    The score of a key is Σ_h w_h · max(0, q_h · k), taken at least in float32; of equal ones the earlier is the better,
    so that the choice depends on nothing but the keys that are visible.

    Args:
        query: [B, H, T, D]; key: [B, 1, L, D]; weights: [B, H, T, 1].
        mask: as in `dense_attention`.

    Returns:
        Boolean [B, 1, T, L], or None where there are no more than `top_k` keys.
    """
    if key.shape[2] <= top_k:
        return None
    precision = torch.promote_types(query.dtype, torch.float32)
    products = torch.matmul(query.to(precision), key.to(precision).transpose(-1, -2)).relu_()
    scores = products.mul_(weights.to(precision)).sum(dim=1, keepdim=True)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    worst = scores.topk(top_k, dim=-1).values[..., -1:]
    better, equal = scores > worst, scores == worst
    best = better | (equal & (equal.cumsum(dim=-1) <= top_k - better.sum(dim=-1, keepdim=True)))
    return best if mask is None else best & mask
