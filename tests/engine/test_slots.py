"""KV slots against a plain dictionary: contents survive moves and reclaims, the books agree."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.slots import KVSlots, LayerShape, bytes_per_token

SHAPES = [LayerShape(2, 4, 2, 4), LayerShape(1, 4, 1, 6), LayerShape(3, 8, 3, 8, index_dim=4)]
CONTEXT, SLOTS = 12, 5


def make(capacity: int = 40, context: int = CONTEXT) -> KVSlots:
    return KVSlots(SHAPES, SLOTS, context, capacity, torch.float64, torch.device("cpu"))


def fill(slots: KVSlots, slot: int, start: int, stop: int, value: float) -> None:
    for layer in range(len(SHAPES)):
        slots.keys[layer][slot, :, start:stop] = value + layer
        slots.values[layer][slot, :, start:stop] = value + layer + 0.5
    slots.index_keys[2][slot, :, start:stop] = value + 0.25


def holds(slots: KVSlots, slot: int, rows: list[float]) -> bool:
    expected = torch.tensor(rows, dtype=torch.float64)
    return bool(
        (slots.index_keys[2][slot, :, : len(rows)] == (expected + 0.25)[None, :, None]).all()
    ) and all(
        bool((slots.keys[layer][slot, :, : len(rows)] == (expected + layer)[None, :, None]).all())
        and bool((slots.values[layer][slot, :, : len(rows)] == (expected + layer + 0.5)[None, :, None]).all())
        for layer in range(len(SHAPES))
    )


def test_planes_of_one_width_share_a_buffer_without_overlap() -> None:
    slots = make()
    assert [tuple(buffer.shape[:2]) for buffer in slots._buffers.values()] == [(5, 6), (5, 1), (5, 6)]
    assert [keys is None for keys in slots.index_keys] == [True, True, False]
    slots.take()
    fill(slots, 0, 0, CONTEXT, 100.0)
    assert holds(slots, 0, [100.0] * CONTEXT)
    assert bytes_per_token(SHAPES, torch.float64) == (2 * 4 + 2 * 4 + 4 + 6 + 3 * 8 + 3 * 8 + 4) * 8


@given(
    operations=st.lists(
        st.one_of(
            st.just(("take", 0, 0)),
            st.tuples(st.just("grow"), st.integers(0, SLOTS - 1), st.integers(1, CONTEXT)),
            st.tuples(st.just("free"), st.integers(0, SLOTS - 1), st.just(0)),
            st.tuples(st.just("copy"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
            st.just(("reclaim", 0, 0)),
        ),
        max_size=60,
    )
)
@settings(max_examples=150, deadline=None)
def test_contents_follow_their_owner(operations: list[tuple[str, int, int]]) -> None:
    slots = make()
    model: list[list[float]] = []
    stamp = 0.0
    for name, a, b in operations:
        if name == "take" and len(model) < SLOTS:
            assert slots.take() == len(model)
            model.append([])
        elif name == "grow" and a < len(model) and slots.can_grow(b - slots.lengths[a]):
            slots.grow(a, b)
            for position in range(len(model[a]), b):
                stamp += 10.0
                fill(slots, a, position, position + 1, stamp)
                model[a].append(stamp)
        elif name == "free" and a < len(model):
            moved = slots.free(a)
            last = model.pop()
            if a < len(model):
                assert moved == len(model)
                model[a] = last
            else:
                assert moved is None
        elif name == "copy" and a < len(model) and b < len(model) and a != b:
            # What the prefix cache does: rows that one slot held are written into another one.
            count = len(model[a])
            if count > len(model[b]) and slots.can_grow(count - len(model[b])):
                start = len(model[b])
                rows = slots.read(a, start, count)
                slots.grow(b, count)
                slots.write(b, start, rows, count - start)
                model[b] += model[a][start:count]
        elif name == "reclaim":
            slots.reclaim()
        assert slots.used == len(model)
        assert slots.lengths == [len(rows) for rows in model]
        assert slots.reserved_tokens == sum(map(len, model)) <= slots.capacity_tokens
        assert all(holds(slots, slot, rows) for slot, rows in enumerate(model))


def test_a_copy_is_independent_of_the_slot() -> None:
    slots = make()
    slots.take()
    slots.grow(0, 3)
    fill(slots, 0, 0, 3, 7.0)
    rows = slots.read(0, 0, 3)
    fill(slots, 0, 0, 3, 9.0)
    slots.write(0, 0, rows, 2)
    assert holds(slots, 0, [7.0, 7.0, 9.0])


def test_no_slot_is_left() -> None:
    slots = make()
    for _ in range(SLOTS):
        slots.take()
    with pytest.raises(RuntimeError, match="no KV slot is free"):
        slots.take()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="memory is not given back here")
def test_reclaim_gives_back_what_nobody_uses() -> None:
    """Reclaimed pages read as zeros; those of slots in use keep their contents."""
    slots = make(context=2000, capacity=10_000)
    for slot in range(3):
        slots.take()
        slots.grow(slot, 2000)
        fill(slots, slot, 0, 2000, float(slot + 1))
    slots.free(2)
    slots.free(1)
    slots.reclaim()
    assert holds(slots, 0, [1.0] * 2000)
    # The first page after the slots in use may be shared with them.
    assert float(slots.keys[0][2].abs().max()) == 0.0
    assert float(slots.values[2][2].abs().max()) == 0.0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="memory is not given back here")
def test_written_rows_stay_within_the_capacity() -> None:
    """Long sequences that ended leave rows behind, also in slots that short ones use now."""
    slots = make(context=2000, capacity=4000)
    for slot in range(2):
        slots.take()
        slots.grow(slot, 2000)
        fill(slots, slot, 0, 2000, 5.0)
    slots.free(1)
    slots.free(0)
    for slot in range(4):
        slots.take()
        slots.grow(slot, 100)
        fill(slots, slot, 0, 100, float(slot))
    slots.grow(3, 500)
    fill(slots, 3, 100, 500, 3.0)
    assert sum(slots._touched) <= slots.capacity_tokens
    for slot in range(2):
        assert holds(slots, slot, [float(slot)] * 100)
        # Whole pages only: up to one page of rows on either side stays.
        assert float(slots.keys[0][slot, :, 300:1800].abs().max()) == 0.0
        assert float(slots.values[2][slot, :, 300:1800].abs().max()) == 0.0
    assert holds(slots, 3, [3.0] * 500)
