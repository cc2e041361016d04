"""Attention of a mixed batch: decoding sequences together, prefill chunks one by one, all over KV slots.

Invariants
* A layer writes the new tokens' keys and values before anything in the same step looks at them.
* A row sees exactly the tokens of its own sequence up to its own position, within the layer's window.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor

from headrace.engine.batch import Chunk
from headrace.engine.slots import KVSlots, LayerShape
from headrace.errors import ModelError
from headrace.models.attention import (
    AttentionOptions,
    Selection,
    best_keys,
    dense_attention,
    narrowed,
    visible,
)

_GATHER_BELOW = 0.6
"""When fewer than this share of the slot range decodes, K and V are gathered instead of computing on the holes."""


class SlotAttention:
    """Attention backend of one engine step.

    The step's row of N tokens holds the decoding sequences first (one token each), then the chunks.

    Args:
        decode_slots: slot of each decoding sequence.
        decode_positions: position of each one's new token.
    """

    def __init__(
        self, slots: KVSlots, decode_slots: list[int], decode_positions: list[int], chunks: list[Chunk]
    ) -> None:
        self.slots = slots
        self.chunks = chunks
        device = slots.keys[0].device
        self.decodes = len(decode_slots)
        self._masks: dict[int | None, Tensor] = {}
        self._chunk_masks: dict[tuple[int, int, int | None], Tensor | None] = {}
        if self.decodes:
            self.slot_index = torch.tensor(decode_slots, device=device)
            self.positions = torch.tensor(decode_positions, device=device)
            self.longest = max(decode_positions) + 1
            low, high = min(decode_slots), max(decode_slots) + 1
            self.dense = self.decodes >= _GATHER_BELOW * (high - low)
            self.low, self.high = low, high
            self.identity_order = decode_slots == list(range(low, high))
            if self.dense and not self.identity_order:
                # Rows of the range that do not decode compute on position 0 and are thrown away.
                row_positions = torch.zeros(high - low, dtype=torch.long, device=device)
                row_positions[self.slot_index - low] = self.positions
                self.row_positions = row_positions
            else:
                self.row_positions = self.positions

    def select(self, layer: int, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> Selection:
        """One mask for the decoding sequences, then one per chunk."""
        keys = self.slots.index_keys[layer]
        assert keys is not None
        masks = []
        if self.decodes:
            self._write(keys, key)
            masks.append(
                best_keys(
                    self._rows(query), self._past(keys), self._rows(weights), self._decode_mask(None), top_k
                )
            )
        for chunk in self.chunks:
            rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
            keys[chunk.slot, :, chunk.start : chunk.stop] = key[:, rows]
            masks.append(
                best_keys(
                    query[None, :, rows],
                    keys[None, chunk.slot, :, : chunk.stop],
                    weights[None, :, rows],
                    self._chunk_mask(chunk, None),
                    top_k,
                )
            )
        return Selection(tuple(masks))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        keys, values = self.slots.keys[layer], self.slots.values[layer]
        selected: Iterator[Tensor | None] = (
            repeat(None) if options.selection is None else iter(options.selection.masks)
        )
        outputs = []
        if self.decodes:
            outputs.append(self._decode(keys, values, query, key, value, options, next(selected)))
        for chunk in self.chunks:
            rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
            keys[chunk.slot, :, chunk.start : chunk.stop] = key[:, rows]
            values[chunk.slot, :, chunk.start : chunk.stop] = value[:, rows]
            outputs.append(
                dense_attention(
                    query[None, :, rows],
                    keys[None, chunk.slot, :, : chunk.stop],
                    values[None, chunk.slot, :, : chunk.stop],
                    narrowed(self._chunk_mask(chunk, options.sliding_window), next(selected)),
                    options,
                )[0]
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _decode(
        self,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        selected: Tensor | None,
    ) -> Tensor:
        self._write(keys, key)
        self._write(values, value)
        mask = narrowed(self._decode_mask(options.sliding_window), selected)
        output = dense_attention(self._rows(query), self._past(keys), self._past(values), mask, options)
        output = output.squeeze(2)
        if self.dense and not self.identity_order:
            output = output[self.slot_index - self.low]
        return output.transpose(0, 1)

    def _write(self, planes: Tensor, states: Tensor) -> None:
        """Put the decoding sequences' rows of `states` [heads, N, D] into the slots."""
        planes[self.slot_index, :, self.positions] = states[:, : self.decodes].transpose(0, 1)

    def _rows(self, states: Tensor) -> Tensor:
        """The decoding sequences' rows of `states` [heads, N, D] as [R, heads, 1, D], beside `_past`."""
        rows = states[:, : self.decodes].transpose(0, 1).unsqueeze(2)
        if not self.dense or self.identity_order:
            return rows
        spread = rows.new_zeros(self.high - self.low, *rows.shape[1:])
        spread[self.slot_index - self.low] = rows
        return spread

    def _past(self, planes: Tensor) -> Tensor:
        """[R, heads, longest, D]: the slots that decode, with the holes between them where these are few."""
        if self.dense:
            return planes[self.low : self.high, :, : self.longest]
        return planes[self.slot_index, :, : self.longest]

    def _decode_mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            key_positions = torch.arange(self.longest, device=self.row_positions.device)
            self._masks[window] = visible(self.row_positions.unsqueeze(-1), key_positions, window)[:, None]
        return self._masks[window]

    def _chunk_mask(self, chunk: Chunk, window: int | None) -> Tensor | None:
        if chunk.stop - chunk.start == 1 and (window is None or chunk.stop <= window):
            return None
        key = (chunk.start, chunk.stop, window)
        if key not in self._chunk_masks:
            device = self.slots.keys[0].device
            self._chunk_masks[key] = visible(
                torch.arange(chunk.start, chunk.stop, device=device),
                torch.arange(chunk.stop, device=device),
                window,
            )
        return self._chunk_masks[key]


class LayerProbe:
    """Attention backend that only records what each layer's keys and values look like, and what it asks for."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.options: dict[int, AttentionOptions] = {}
        self._index_dims: dict[int, int] = {}

    @property
    def ordered_shapes(self) -> list[LayerShape]:
        return [self.shapes[layer] for layer in sorted(self.shapes)]

    def select(self, layer: int, query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> Selection:
        self._index_dims[layer] = key.shape[-1]
        return Selection(())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if layer in self.shapes:
            raise ModelError(
                f"layer {layer} of this model attends more than once in a forward; not supported"
            )
        self.shapes[layer] = LayerShape(
            key.shape[0], key.shape[-1], value.shape[0], value.shape[-1], self._index_dims.get(layer, 0)
        )
        self.options[layer] = options
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
