"""Attention over a packed row: groups side by side, each one a prompt followed by its responses.

Invariants
* A prompt token sees the prompt up to itself; a response token sees the whole prompt and its own response up
  to itself; nothing sees another response or another group.
* A token's position is its position in its own sequence (prompt, then response), also for sliding windows.
* The cost is that of the blocks above: there is no mask over the whole row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace import kernels
from headrace.errors import ModelError
from headrace.kernels import PackedLayout
from headrace.models.attention import (
    ATTENTION,
    AttentionOptions,
    Selection,
    attention_backend,
    best_keys,
    dense_attention,
    narrowed,
    visible,
)
from headrace.models.indexer import use_indexers
from headrace.models.load import unsupported_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST_BUCKET = 16
"""Responses up to this length are padded to one another; longer ones at most to twice their length."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and the responses to it, in the order of the row. A response may be empty."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A padded block of `batch` sequences of `length` tokens after the prompt that is piece `prompt`."""

    batch: int
    length: int
    prompt: int | None = None


class PackedAttention:
    """The attention of one packed row, as a backend of headrace's attention function.

    Responses of one segment with similar lengths form a padded batch whose keys are the prompt's and their
    own. Padding stands after a response's tokens, where causality hides it: one mask serves the whole batch.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> None:
        self.num_tokens = sum(segment.length for segment in segments)
        self.calls = 0
        self._pieces: list[_Piece] = []
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        gather: list[int] = []
        start = 0
        for segment in segments:
            prompt = len(self._pieces)
            self._pieces.append(_Piece(1, segment.prompt))
            gather.extend(range(start, start + segment.prompt))
            offset = start + segment.prompt
            buckets: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for length in segment.responses:
                if length:
                    buckets[_bucket(length)].append((offset, length))
                offset += length
            for members in buckets.values():
                longest = max(length for _, length in members)
                self._pieces.append(_Piece(len(members), longest, prompt))
                for first, length in members:
                    gather.extend(range(first, first + length))
                    gather.extend([first + length - 1] * (longest - length))
            start += segment.length
        self._layout = PackedLayout([(segment.prompt, *segment.responses) for segment in segments])
        self._gather = torch.tensor(gather, device=device)
        inverse = [-1] * self.num_tokens
        for padded in range(len(gather) - 1, -1, -1):
            inverse[gather[padded]] = padded  # the first occurrence is the token, later ones are padding
        self._inverse = torch.tensor(inverse, device=device)

    def select(self, layer: int, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> Selection:
        """One mask per piece."""
        queries, keys, factors = self._blocks(query), self._blocks(key), self._blocks(weights)
        masks = []
        for index in range(len(self._pieces)):
            mask = self._mask(index, None, query.device)
            masks.append(best_keys(queries[index], self._seen(keys, index), factors[index], mask, top_k))
        return Selection(tuple(masks))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """query [H, N, D], key [Hkv, N, D], value [Hkv, N, Dv] -> [H, N, Dv] for the row's N tokens."""
        if query.shape[1] != self.num_tokens:
            raise ValueError(f"packed attention for {self.num_tokens} tokens was given {query.shape[1]}")
        self.calls += 1
        if _native(query, key, value, options):
            return kernels.packed_attention(
                query, key, value, self._layout, options.scaling, options.sliding_window
            )
        queries, keys, values = self._blocks(query), self._blocks(key), self._blocks(value)
        outputs = []
        for index in range(len(self._pieces)):
            mask: Tensor | None = self._mask(index, options.sliding_window, query.device)
            if options.selection is not None:
                mask = narrowed(mask, options.selection.masks[index])
            output = dense_attention(
                queries[index], self._seen(keys, index), self._seen(values, index), mask, options
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._inverse).transpose(0, 1)

    def _seen(self, blocks: list[Tensor], index: int) -> Tensor:
        """What the queries of a piece look at: its own block [batch, heads, length, D], after its prompt's."""
        piece = self._pieces[index]
        if piece.prompt is None:
            return blocks[index]
        return torch.cat([blocks[piece.prompt].expand(piece.batch, -1, -1, -1), blocks[index]], dim=2)

    def _blocks(self, states: Tensor) -> list[Tensor]:
        """[heads, N, D] -> one [batch, heads, length, D] per piece."""
        padded = states.transpose(0, 1).index_select(0, self._gather)
        parts = torch.split(padded, [piece.batch * piece.length for piece in self._pieces])
        return [
            torch.unflatten(part, 0, (piece.batch, piece.length)).transpose(1, 2)
            for part, piece in zip(parts, self._pieces, strict=True)
        ]

    def _mask(self, index: int, window: int | None, device: torch.device) -> Tensor:
        if (index, window) not in self._masks:
            piece = self._pieces[index]
            before = 0 if piece.prompt is None else self._pieces[piece.prompt].length
            positions = torch.arange(before + piece.length, device=device)
            self._masks[index, window] = visible(positions[before:], positions, window)
        return self._masks[index, window]


@contextmanager
def packed_attention(module: PreTrainedModel, attention: PackedAttention) -> Iterator[None]:
    """Let `module` attend through `attention` inside the block, whatever it uses outside.

    Raises:
        ModelError: the module never called headrace's attention function, so its responses would see one
            another.
    """
    previous = module.config._attn_implementation
    calls = attention.calls
    if previous != ATTENTION:
        module.set_attn_implementation(ATTENTION)
        use_indexers(module)
    try:
        with attention_backend(attention):
            yield
    finally:
        if previous != ATTENTION:
            module.set_attn_implementation(previous)
    if attention.calls == calls:
        raise ModelError(
            f"{type(module).__name__} does not attend through transformers' attention interface, "
            "so headrace cannot train it"
        )


def check_packable(module: PreTrainedModel) -> None:
    """Refuse architectures in which tokens of a packed row could meet outside the attention function.

    Raises:
        ModelError: the model has recurrent, chunked or unknown layers.
    """
    other = unsupported_layers(module.config.get_text_config())
    if other or getattr(module, "_is_stateful", False):
        raise ModelError(
            f"{type(module).__name__} has {', '.join(other) or 'recurrent'} layers, through which packed "
            "responses would see one another; headrace trains models with full, sliding-window or sparse attention"
        )


def _native(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Whether headrace's own kernel computes this attention."""
    dim = query.shape[-1]
    plain = options.softcap is None and options.sinks is None and options.selection is None
    fits = dim == key.shape[-1] == value.shape[-1] and dim % 16 == 0
    return plain and fits and kernels.suits(query, key, value)


def _bucket(length: int) -> int:
    """Lengths with one bucket are padded to one another: those between two powers of two."""
    return (max(length, SMALLEST_BUCKET) - 1).bit_length()
