"""Memory for packed weights, on huge pages where the system has them: a step reads it all, and the TLB holds little."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_ALIGNMENT = 64
_CHUNK = 64 * 2**20


class HugePages:
    """Hands out tensors from large mappings. Memory goes back when all tensors of a mapping are gone."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor [count] on a cache line's border; zeros at first."""
        size = count * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _mapping(max(size, _CHUNK)), 0
        tensor = self._chunk[self._used : self._used + size].view(dtype)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor


def _mapping(size: int) -> Tensor:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
