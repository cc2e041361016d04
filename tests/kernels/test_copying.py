"""Blocks into slots and out of them: the same bytes and sums with and without kernels, from wherever they lie."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import copying
from headrace.kernels.copying import BlockLayout, Loading, bytes_at, store, unflatten
from headrace.kernels.fingerprint import digest_of_sums, fingerprint

LAYOUT = BlockLayout(((5, 3), (2, 64), (1, 1)), torch.float32)
ROWS = 7


def tensors(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(planes, rows, width, generator=generator) for planes, width in LAYOUT.buffers]


def a_slot(rows: int = 40) -> list[Tensor]:
    """A view of padded planes, as a real slot is."""
    return [torch.zeros(planes, rows + 3, width)[:, :rows] for planes, width in LAYOUT.buffers]


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.kernels), False], ids=["kernels", "plain"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(copying, "available", lambda: False)
    return request.param


def flat(block: list[Tensor]) -> np.ndarray:
    return np.concatenate([t.contiguous().view(-1).view(torch.uint8).numpy() for t in block])


def add(kind: str, loading: Loading, block: list[Tensor], taken: int, first: int, folder: Path) -> object:
    """Returns what must live until the load."""
    rows = block[0].shape[1]
    if kind == "tensors":
        loading.add_tensors(block, taken, first)
        return block
    data = flat(block)
    if kind == "memory":
        loading.add_flat(data.ctypes.data, rows, taken, first)
        return data
    path = folder / f"block-{first}"
    path.write_bytes(b"before" + data.tobytes() + b"after")
    stream = path.open("rb")
    loading.add_file(stream.fileno(), 6, rows, taken, first)
    return stream


def test_rows_arrive_from_every_kind_of_place(native: bool, tmp_path: Path) -> None:
    blocks = [tensors(ROWS, seed) for seed in range(4)]
    loading, alive = Loading(LAYOUT), []
    for i, (kind, taken) in enumerate([("tensors", 7), ("memory", 7), ("file", 7), ("memory", 5)]):
        alive.append(add(kind, loading, blocks[i], taken, i * ROWS, tmp_path))
    views = a_slot()
    status, sums = loading.load(views)
    assert status == [0, 0, 0, 0]
    for b, view in enumerate(views):
        expected = torch.cat([blocks[0][b], blocks[1][b], blocks[2][b], blocks[3][b][:, :5]], dim=1)
        assert torch.equal(view[:, : 3 * ROWS + 5], expected)
        assert not view[:, 3 * ROWS + 5 :].any()
    assert len(sums[0]) == 0
    size = ROWS * LAYOUT.row_bytes
    for i in (1, 2, 3):  # also of the rows that were not taken
        assert digest_of_sums(sums[i], size).hex() == fingerprint(flat(blocks[i]).tobytes())
    assert Loading(LAYOUT).load(views) == ([], [])


@pytest.mark.parametrize("strided", [False, True])
def test_store_writes_flat_what_load_reads(native: bool, strided: bool) -> None:
    slot = a_slot()
    for view in slot:
        view.copy_(torch.randn(view.shape))
    starts = [0, 7, 20]
    blocks = [[v[:, s : s + ROWS] if strided else v[:, s : s + ROWS].clone() for v in slot] for s in starts]
    size = ROWS * LAYOUT.row_bytes
    memory = np.zeros(3 * size, dtype=np.uint8)
    sums = store(blocks, [memory.ctypes.data + i * size for i in range(3)])
    loading = Loading(LAYOUT)
    for i, start in enumerate(starts):
        part = memory[i * size : (i + 1) * size]
        assert part.tobytes() == flat([v[:, start : start + ROWS] for v in slot]).tobytes()
        assert digest_of_sums(sums[i], size).hex() == fingerprint(part.tobytes())
        assert all(map(torch.equal, unflatten(part, LAYOUT, ROWS), blocks[i]))
        loading.add_flat(part.ctypes.data, ROWS, ROWS, i * ROWS)
    views = a_slot()
    _, again = loading.load(views)
    assert all(map(np.array_equal, sums, again))
    assert torch.equal(views[0][:, :ROWS], slot[0][:, :ROWS])
    assert bytes_at(memory.ctypes.data, 4).tobytes() == memory[:4].tobytes()


def _short(path: Path) -> int:
    path.write_bytes(b"x" * 10)
    return os.open(path, os.O_RDONLY)


def _closed(path: Path) -> int:
    descriptor = _short(path)
    os.close(descriptor)
    return descriptor


def _folder(path: Path) -> int:
    return os.open(path.parent, os.O_RDONLY)


@pytest.mark.parametrize(
    ("opened", "expected"), [(_short, errno.ENODATA), (_closed, errno.EBADF), (_folder, errno.EISDIR)]
)
def test_a_file_that_cannot_be_read_has_a_status(
    native: bool, tmp_path: Path, opened: Callable[[Path], int], expected: int
) -> None:
    good = tensors(ROWS, 1)
    loading = Loading(LAYOUT)
    loading.add_file(opened(tmp_path / "file"), 0, ROWS, ROWS, 0)
    loading.add_tensors(good, ROWS, ROWS)
    views = a_slot()
    status, _ = loading.load(views)
    assert status == [expected, 0]
    assert torch.equal(views[1][:, ROWS : 2 * ROWS], good[1])
    assert not views[1][:, :ROWS].any()


def test_nowait_gives_what_is_in_memory_or_says_so(native: bool, tmp_path: Path) -> None:
    loading = Loading(LAYOUT)
    block = tensors(ROWS, 1)
    stream = add("file", loading, block, ROWS, 0, tmp_path)
    views = a_slot()
    status, _ = loading.load(views, nowait=True)
    assert status[0] == 0 or status[0] in Loading.COLD
    if not status[0]:
        assert torch.equal(views[0][:, :ROWS], block[0])
    stream.close()  # type: ignore[attr-defined]
