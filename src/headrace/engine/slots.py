"""The KV of running sequences: one contiguous slot per sequence.

Each layer's keys and values are *planes*, one per KV head, and so are the keys of its indexer. Planes of equal
width share a buffer of shape [slots, planes, capacity, D], so that moving a whole sequence is one strided copy. Memory
is reserved at start but taken from the system only where it is written (CPU), and given back by `reclaim`.

Invariants
* Slots in use are always 0 … n-1: freeing a slot moves the last one into its place (`free` says so).
* `reserved` tokens of all slots never exceed `capacity_tokens`; the scheduler asks `can_grow` first.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.errors import UserError

_ROW_PADDING = 16
"""Rows added to each plane, so that planes do not lie a power of two apart and fight for the same cache sets."""

_GRANULE = 65536
"""Buffers in shared memory begin at multiples of this, and so at whole pages on every system."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads and widths of one layer's keys and values. `index_dim` is the width of its indexer's keys, 0 without."""

    heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    index_dim: int = 0


class BufferPlace(NamedTuple):
    """Where a buffer [slots, planes, rows, D] lies in shared memory: `offset` in bytes."""

    shape: tuple[int, ...]
    offset: int


class KVSlots:
    """KV memory for `max_sequences` sequences of up to `context_length` tokens.

    Args:
        shapes: per layer, as the model's forward shows them.
        capacity_tokens: the most tokens that all slots together may hold.
        shared: descriptor of an empty file in memory (CPU only). The buffers are put there, so that another process
            can map them (`places`, `map_buffers`).
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        max_sequences: int,
        context_length: int,
        capacity_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: int | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.max_sequences = max_sequences
        self.context_length = context_length
        self.capacity_tokens = capacity_tokens
        self.dtype = dtype
        self.lengths: list[int] = []
        self._touched = [0] * max_sequences
        planes: dict[int, int] = {}
        places: list[tuple[slice, slice, slice]] = []

        def place(dim: int, heads: int) -> slice:
            start = planes.get(dim, 0)
            planes[dim] = start + heads
            return slice(start, start + heads)

        for shape in self.shapes:
            keys, values = place(shape.key_dim, shape.heads), place(shape.value_dim, shape.value_heads)
            places.append((keys, values, place(shape.index_dim, 1) if shape.index_dim else slice(0)))
        rows = context_length + _ROW_PADDING
        self._maps: list[mmap.mmap | None] = []
        self._shared = shared
        self.places: list[BufferPlace] = []
        """Where the buffers lie in shared memory; empty without."""
        self._buffers: dict[int, Tensor] = {
            dim: self._allocate((max_sequences, count, rows, dim), dtype, device)
            for dim, count in planes.items()
        }
        self.keys: list[Tensor] = []
        """Per layer [slots, heads, rows, D], a view."""
        self.values: list[Tensor] = []
        self.index_keys: list[Tensor | None] = []
        """Those of the layer's indexer, [slots, 1, rows, D]; None in layers without one."""
        for shape, (keys, values, index_keys) in zip(self.shapes, places, strict=True):
            self.keys.append(self._buffers[shape.key_dim][:, keys])
            self.values.append(self._buffers[shape.value_dim][:, values])
            self.index_keys.append(self._buffers[shape.index_dim][:, index_keys] if shape.index_dim else None)

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self.lengths)

    @property
    def reserved_tokens(self) -> int:
        return sum(self.lengths)

    def can_grow(self, tokens: int) -> bool:
        return self.reserved_tokens + tokens <= self.capacity_tokens

    def take(self) -> int:
        """A free slot."""
        if self.used == self.max_sequences:
            raise RuntimeError("no KV slot is free")
        self.lengths.append(0)
        return self.used - 1

    def grow(self, slot: int, length: int) -> None:
        """Reserve room for the first `length` tokens of a slot."""
        self.lengths[slot] = max(self.lengths[slot], length)
        self._touched[slot] = max(self._touched[slot], length)
        if sum(self._touched) > self.capacity_tokens:
            self.reclaim()

    def free(self, slot: int) -> int | None:
        """Give a slot up. Returns the slot whose contents moved into it (always the last one), or None."""
        last = self.used - 1
        moved = None
        if slot != last:
            length = self.lengths[last]
            for buffer in self._buffers.values():
                buffer[slot, :, :length] = buffer[last, :, :length]
            self.lengths[slot] = length
            self._touched[slot] = max(self._touched[slot], length)
            moved = last
        self.lengths.pop()
        return moved

    def read(self, slot: int, start: int, stop: int) -> list[Tensor]:
        """Copy rows out: one tensor [planes, stop - start, D] per buffer."""
        return [buffer[slot, :, start:stop].clone() for buffer in self._buffers.values()]

    def write(self, slot: int, start: int, rows: Sequence[Tensor], count: int) -> None:
        """Copy the first `count` rows that `read` made into a slot, from position `start`."""
        for buffer, tensor in zip(self._buffers.values(), rows, strict=True):
            buffer[slot, :, start : start + count] = tensor[:, :count]

    def rows(self, slot: int) -> list[Tensor]:
        """A slot's rows as they lie in memory: one view [planes, rows, D] per buffer."""
        return [buffer[slot] for buffer in self._buffers.values()]

    def reclaim(self) -> None:
        """Give rows that nobody uses back to the system: of unused slots, and behind the end of shorter successors."""
        for buffer, mapping in zip(self._buffers.values(), self._maps, strict=True):
            if mapping is None:
                continue
            slot_bytes, plane_bytes, row_bytes, _ = (n * buffer.element_size() for n in buffer.stride())
            # Shared memory is given back only when it is taken out of the file.
            advice = mmap.MADV_DONTNEED if self._shared is None else mmap.MADV_REMOVE
            _discard(mapping, self.used * slot_bytes, len(mapping), advice)
            for slot, length in enumerate(self.lengths):
                touched = self._touched[slot]
                for plane in range(buffer.shape[1] if touched > length else 0):
                    base = slot * slot_bytes + plane * plane_bytes
                    _discard(mapping, base + length * row_bytes, base + touched * row_bytes, advice)
        self._touched = [*self.lengths, *[0] * (self.max_sequences - self.used)]

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
            self._maps.append(None)
            # Zeros: attention multiplies what it masks by 0, and 0 * NaN would spoil its neighbours.
            return torch.zeros(shape, dtype=dtype, device=device)
        count = math.prod(shape)
        if self._shared is not None:
            place = BufferPlace(shape, os.fstat(self._shared).st_size)
            os.ftruncate(self._shared, place.offset + -(-count * dtype.itemsize // _GRANULE) * _GRANULE)
            self.places.append(place)
            mapping = _map(self._shared, place, dtype)
            self._maps.append(mapping)
            return torch.frombuffer(mapping, dtype=dtype).view(shape)
        # Reserving is free, only writing takes memory; the scheduler keeps what is written within the capacity.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            mapping = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
        except OSError as error:
            raise UserError(
                f"too little memory for KV: the system does not reserve {count * dtype.itemsize / 2**20:,.0f} MB "
                f"({error.strerror}); lower engine.max_sequences or engine.context_length"
            ) from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A huge page would make a short sequence take the memory of a long one.
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self._maps.append(mapping)
        return torch.frombuffer(mapping, dtype=dtype).view(shape)


def map_buffers(file: int, places: Sequence[BufferPlace], dtype: torch.dtype) -> list[Tensor]:
    """The buffers [slots, planes, rows, D] of another process's `KVSlots`, in the order of `KVSlots.read`'s tensors."""
    return [torch.frombuffer(_map(file, place, dtype), dtype=dtype).view(place.shape) for place in places]


def _map(file: int, place: BufferPlace, dtype: torch.dtype) -> mmap.mmap:
    return mmap.mmap(
        file, math.prod(place.shape) * dtype.itemsize, flags=mmap.MAP_SHARED, offset=place.offset
    )


def _discard(mapping: mmap.mmap, start: int, stop: int, advice: int) -> None:
    """Drop the whole pages between two byte offsets; they read as zeros from now on."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        mapping.madvise(advice, start, stop - start)


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    return (
        sum(s.heads * s.key_dim + s.value_heads * s.value_dim + s.index_dim for s in shapes) * dtype.itemsize
    )
