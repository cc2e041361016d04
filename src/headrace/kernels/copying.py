"""KV rows between blocks and slots: all blocks of a sequence in one call, on several threads.

A *block* holds rows of every plane. It stands in one tensor [planes, rows, D] per buffer, or flat (those tensors one
after the other) at an address or in a file. The flat ones are fingerprinted while they are copied.

Invariants
* With and without the native kernels the same bytes arrive and the same sums come back.
* Reading a file never raises: each block has a status, 0 or the error's number.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.fingerprint import constants, stripe_sums, stripes
from headrace.kernels.library import available, library


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What a row of KV is made of: per buffer (planes, width), and the element type."""

    buffers: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> BlockLayout:
        """The layout of tensors [planes, rows, D], one per buffer."""
        return cls(tuple((view.shape[0], view.shape[2]) for view in views), views[0].dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows in all planes."""
        return sum(planes * width for planes, width in self.buffers) * self.dtype.itemsize


_POINTERS = (
    *("addresses", "files", "offsets", "stored", "taken", "first"),
    *("slot", "sums_at", "sums", "constants", "status"),
)


class _Rows(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("planes", "plane_stride", "row_bytes")),
    ]


class _BlockCopy(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_int64),
        ("buffers", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("nowait", ctypes.c_int32),
    ]


@dataclass(slots=True)
class Loading:
    """Blocks to copy into one slot; `load` does it. Each `add_…` gives the rows held, those to copy, and where to."""

    UNKNOWN: ClassVar[int] = errno.EOPNOTSUPP
    """The status of a block in a file of which the system cannot tell whether it is in memory."""
    COLD: ClassVar[tuple[int, ...]] = (errno.EAGAIN, UNKNOWN)

    layout: BlockLayout
    tensors: list[Sequence[Tensor] | None] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)

    def add_tensors(self, tensors: Sequence[Tensor], taken: int, first: int) -> None:
        """A block in one contiguous tensor [planes, rows, D] per buffer; it has no sums."""
        self._add(tensors, 0, -1, 0, tensors[0].shape[1], taken, first)

    def add_flat(self, address: int, stored: int, taken: int, first: int) -> None:
        """A flat block in this process's memory."""
        self._add(None, address, -1, 0, stored, taken, first)

    def add_file(self, file: int, offset: int, stored: int, taken: int, first: int) -> None:
        """A flat block in an open file (its descriptor)."""
        self._add(None, 0, file, offset, stored, taken, first)

    def load(self, views: Sequence[Tensor], *, nowait: bool = False) -> tuple[list[int], list[np.ndarray]]:
        """Copy all blocks into a slot.

        Args:
            views: the slot, [planes, rows, D] per buffer; rows of a plane are contiguous.
            nowait: read from files only what is in memory already; else their status is `EAGAIN`, or
                `EOPNOTSUPP` where the file system cannot tell.

        Returns:
            Per block its status, and its stripe sums (none for one in tensors).

        Raises:
            ValueError: a block would reach beyond the slot.
        """
        if not self.stored:
            return [], []
        if max(map(sum, zip(self.first, self.taken, strict=True))) > views[0].shape[1]:
            raise ValueError(f"blocks reach beyond the slot's {views[0].shape[1]} rows")
        if views[0].device.type == "cpu" and available():
            return self._load_native(views, nowait)
        return self._load_plain(views, nowait)

    def _add(
        self,
        tensors: Sequence[Tensor] | None,
        address: int,
        file: int,
        offset: int,
        stored: int,
        taken: int,
        first: int,
    ) -> None:
        self.tensors.append(tensors)
        self.addresses.append(address)
        self.files.append(file)
        self.offsets.append(offset)
        self.stored.append(stored)
        self.taken.append(taken)
        self.first.append(first)

    def _load_native(self, views: Sequence[Tensor], nowait: bool) -> tuple[list[int], list[np.ndarray]]:
        count = len(self.stored)
        stored = np.array(self.stored, dtype=np.int64)
        item = self.layout.dtype.itemsize
        widths = np.array([planes * width * item for planes, width in self.layout.buffers], dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(widths)[:-1]])
        addresses = np.array(self.addresses, dtype=np.int64)[:, None] + stored[:, None] * before[None, :]
        for i, tensors in enumerate(self.tensors):
            if tensors is not None:
                addresses[i] = [tensor.data_ptr() for tensor in tensors]
        summed = np.array([tensors is None for tensors in self.tensors])
        counts = np.where(summed, -(-stored * int(widths.sum()) // (8 * constants().size)), 0)
        starts = np.concatenate([[0], np.cumsum(counts)])
        sums = np.empty(int(starts[-1]), dtype=np.uint64)
        status = np.zeros(count, dtype=np.int32)
        _call(
            "load_blocks",
            count,
            rows=(_Rows * len(views))(*(_rows(view, 0) for view in views)),
            buffers=len(views),
            nowait=nowait,
            addresses=np.ascontiguousarray(addresses),
            files=np.array(self.files, dtype=np.int32),
            offsets=np.array(self.offsets, dtype=np.int64),
            stored=stored,
            taken=np.array(self.taken, dtype=np.int64),
            first=np.array(self.first, dtype=np.int64),
            sums_at=np.where(summed, starts[:-1], -1),
            sums=sums,
            status=status,
        )
        return status.tolist(), np.split(sums, starts[1:-1])

    def _load_plain(self, views: Sequence[Tensor], nowait: bool) -> tuple[list[int], list[np.ndarray]]:
        status: list[int] = []
        sums: list[np.ndarray] = []
        for i, tensors in enumerate(self.tensors):
            error = 0
            block_sums = np.empty(0, dtype=np.uint64)
            if tensors is None:
                size = self.stored[i] * self.layout.row_bytes
                if self.files[i] >= 0:
                    flat, error = _read_file(self.files[i], self.offsets[i], size, nowait)
                else:
                    flat = bytes_at(self.addresses[i], size)
                if not error:
                    block_sums = stripe_sums(flat)
                    tensors = unflatten(flat, self.layout, self.stored[i])
            status.append(error)
            sums.append(block_sums)
            if tensors is not None:
                start, rows = self.first[i], self.taken[i]
                for view, tensor in zip(views, tensors, strict=True):
                    view[:, start : start + rows] = tensor[:, :rows]
        return status, sums


def store(blocks: Sequence[Sequence[Tensor]], addresses: Sequence[int]) -> list[np.ndarray]:
    """Write blocks flat to memory and return the stripe sums of each.

    Args:
        blocks: per block one tensor [planes, rows, D] per buffer; rows of a plane are contiguous.
        addresses: where each one's bytes go.
    """
    if not blocks:
        return []
    layout = BlockLayout.of(blocks[0])
    if blocks[0][0].device.type != "cpu" or not available():
        return [_store_plain(block, address) for block, address in zip(blocks, addresses, strict=True)]
    rows = np.array([block[0].shape[1] for block in blocks], dtype=np.int64)
    counts = [stripes(int(n) * layout.row_bytes) for n in rows]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    sums = np.empty(int(starts[-1]), dtype=np.uint64)
    buffers = len(layout.buffers)
    _call(
        "store_blocks",
        len(blocks),
        rows=(_Rows * (len(blocks) * buffers))(*(_rows(view, 0) for block in blocks for view in block)),
        buffers=buffers,
        nowait=False,
        addresses=np.array(addresses, dtype=np.int64),
        taken=rows,
        sums_at=starts[:-1].copy(),
        sums=sums,
    )
    return np.split(sums, starts[1:-1])


def bytes_at(address: int, size: int) -> np.ndarray:
    """The memory [size], uint8, at an address of this process; whoever gives it keeps it mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def unflatten(flat: np.ndarray, layout: BlockLayout, rows: int) -> list[Tensor]:
    """A flat block as one tensor [planes, rows, D] per buffer; they share its memory."""
    tensors = []
    start = 0
    for planes, width in layout.buffers:
        size = planes * rows * width * layout.dtype.itemsize
        part = torch.from_numpy(flat[start : start + size]).view(layout.dtype)
        tensors.append(part.view(planes, rows, width))
        start += size
    return tensors


def _store_plain(block: Sequence[Tensor], address: int) -> np.ndarray:
    size = sum(view.numel() * view.element_size() for view in block)
    flat = bytes_at(address, size)
    for tensor, view in zip(unflatten(flat, BlockLayout.of(block), block[0].shape[1]), block, strict=True):
        tensor.copy_(view)
    return stripe_sums(flat)


def _read_file(file: int, offset: int, size: int, nowait: bool) -> tuple[np.ndarray, int]:
    flat = np.empty(size, dtype=np.uint8)
    view = memoryview(flat)
    if nowait and not hasattr(os, "RWF_NOWAIT"):
        return flat, errno.EOPNOTSUPP
    flags = os.RWF_NOWAIT if nowait else 0
    got = 0
    try:
        while got < size:
            count = os.preadv(file, [view[got:]], offset + got, flags)
            if not count:
                return flat, errno.ENODATA
            got += count
    except OSError as error:
        return flat, error.errno or errno.EIO
    return flat, 0


def _rows(view: Tensor, row: int) -> _Rows:
    planes, _, width = view.shape
    item = view.element_size()
    assert view.stride(2) == 1
    assert view.stride(1) == width
    return _Rows(view.data_ptr() + row * width * item, planes, view.stride(0) * item, width * item)


def _call(
    name: str, blocks: int, *, rows: ctypes.Array[_Rows], buffers: int, nowait: bool, **arrays: np.ndarray
) -> None:
    """One call of the library; the arrays live until it returns."""
    copy = _BlockCopy(blocks=blocks, buffers=buffers, nowait=nowait)
    for field_name, array in {**arrays, "constants": constants()}.items():
        setattr(copy, field_name, array.ctypes.data)
    copy.slot = ctypes.cast(rows, ctypes.c_void_p)
    getattr(library(), f"headrace_{name}")(ctypes.byref(copy), ctypes.c_int32(torch.get_num_threads()))
