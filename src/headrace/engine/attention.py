"""Attention of a mixed batch: decoding sequences together, prefill chunks one by one, all over KV slots.

Invariants
* A layer writes the new tokens' keys and values before anything in the same step looks at them.
* A row sees exactly the tokens of its own sequence up to its own position, within the layer's window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.slots import KVSlots, LayerShape
from headrace.errors import ModelError
from headrace.models.attention import AttentionOptions, dense_attention, visible

_GATHER_BELOW = 0.6
"""When fewer than this share of the slot range decodes, K and V are gathered instead of computing on the holes."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill of positions `start … stop-1` of one slot; its rows begin at `row` in the batch."""

    slot: int
    start: int
    stop: int
    row: int


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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        keys, values = self.slots.keys[layer], self.slots.values[layer]
        outputs = []
        if self.decodes:
            outputs.append(self._decode(keys, values, query, key, value, options))
        for chunk in self.chunks:
            rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
            keys[chunk.slot, :, chunk.start : chunk.stop] = key[:, rows]
            values[chunk.slot, :, chunk.start : chunk.stop] = value[:, rows]
            outputs.append(
                dense_attention(
                    query[None, :, rows],
                    keys[None, chunk.slot, :, : chunk.stop],
                    values[None, chunk.slot, :, : chunk.stop],
                    self._chunk_mask(chunk, options.sliding_window),
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
    ) -> Tensor:
        count = self.decodes
        keys[self.slot_index, :, self.positions] = key[:, :count].transpose(0, 1)
        values[self.slot_index, :, self.positions] = value[:, :count].transpose(0, 1)
        rows = query[:, :count].transpose(0, 1).unsqueeze(2)
        if self.dense:
            k = keys[self.low : self.high, :, : self.longest]
            v = values[self.low : self.high, :, : self.longest]
            if not self.identity_order:
                spread = rows.new_zeros(self.high - self.low, *rows.shape[1:])
                spread[self.slot_index - self.low] = rows
                rows = spread
        else:
            k = keys[self.slot_index, :, : self.longest]
            v = values[self.slot_index, :, : self.longest]
        output = dense_attention(rows, k, v, self._decode_mask(options.sliding_window), options).squeeze(2)
        if self.dense and not self.identity_order:
            output = output[self.slot_index - self.low]
        return output.transpose(0, 1)

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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if layer in self.shapes:
            raise ModelError(
                f"layer {layer} of this model attends more than once in a forward; not supported"
            )
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[-1], value.shape[0], value.shape[-1])
        self.options[layer] = options
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
