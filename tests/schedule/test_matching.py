"""The next unit, over every small state of the line, and a cell that runs nothing but what it is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule import DecodeCost, LineState, Unit, next_unit, worth_starting

MICRO_BATCH = 4


def every_state(b: int) -> Iterator[LineState]:
    for committed in range(b + 1):
        for pending in range(committed + 1):
            tokens = range(MICRO_BATCH + 2) if pending else (0,)
            for count, decodable, waiting in product(tokens, (0, 1, 5), (0, 2)):
                yield LineState(b, committed, pending, count, MICRO_BATCH, decodable, waiting)


@pytest.mark.parametrize("groups_per_step", [1, 2, 3])
def test_every_state(groups_per_step: int) -> None:
    for state in every_state(groups_per_step):
        check(state)


def check(state: LineState) -> None:
    unit = next_unit(state)
    full = state.committed == state.groups_per_step
    pending = state.pending_gradient_groups > 0
    micro_batch = pending and state.pending_gradient_tokens >= MICRO_BATCH

    can_run = {
        Unit.DECODE: state.decodable > 0,
        Unit.GRADIENT: pending,
        Unit.OPTIMIZER_STEP: full and not pending,
    }
    assert unit is Unit.WAIT or can_run[unit], "only what can run is chosen"
    assert (unit is Unit.WAIT) == (not any(can_run.values())), "never idle while something can run"
    if full:
        assert unit is (Unit.GRADIENT if pending else Unit.OPTIMIZER_STEP), "a whole step is finished first"
    elif micro_batch:
        assert unit is Unit.GRADIENT, "a full micro-batch goes before decoding"
    elif state.decodable:
        assert unit is Unit.DECODE, "a small piece of gradient does not interrupt decoding"
    assert unit is next_unit(replace(state, waiting_on_environment=9)), "environments answer by themselves"
    assert state.stalled == (unit is Unit.WAIT and state.waiting_on_environment == 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=8), st.integers(1, 12))
def test_a_step_always_finishes(groups: list[tuple[int, int]], micro_batch_tokens: int) -> None:
    """A cell that obeys turns groups of (tokens, decode units) into one optimizer step without idling."""
    decoding = [max(units, 1) for _, units in groups]
    tokens = [count for count, _ in groups]
    pending: list[int] = []
    committed = taken = 0
    for _ in range(sum(decoding) + len(groups) + 1):
        state = LineState(
            len(groups), committed, len(pending), sum(pending), micro_batch_tokens, len(decoding), 0
        )
        unit = next_unit(state)
        if unit is Unit.DECODE:
            decoding[0] -= 1
            if decoding[0] == 0:
                decoding.pop(0)
                pending.append(tokens[committed])
                committed += 1
        elif unit is Unit.GRADIENT:
            pending.pop(0)
            taken += 1
        else:
            break
    assert unit is Unit.OPTIMIZER_STEP
    assert taken == len(groups)


@pytest.mark.parametrize(
    "changes",
    [
        {"committed": 3},
        {"committed": 0},
        {"pending_gradient_groups": -1},
        {"pending_gradient_groups": 0},
        {"pending_gradient_tokens": -1},
        {"decodable": -1},
        {"waiting_on_environment": -1},
        {"micro_batch_tokens": 0},
    ],
)
def test_contradictory_counts_are_refused(changes: dict[str, int]) -> None:
    state = LineState(2, 1, 1, 3, 4, 0, 0)
    with pytest.raises(ValueError, match="LineState"):
        replace(state, **changes)


def test_units_are_their_names() -> None:
    assert [str(unit) for unit in Unit] == ["decode", "gradient", "optimizer_step", "wait"]


def test_the_room_loads_without_torch() -> None:
    code = "import sys, headrace.schedule; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def measured(fixed: float, per_sequence: float, counts: Iterable[int]) -> DecodeCost:
    cost = DecodeCost()
    for n in counts:
        cost.add(n, fixed + per_sequence * n)
    return cost


def starting(cost: DecodeCost | None = None, **changed: int) -> bool:
    """Whether to start a group when the step has all it needs; by default 20 sequences are efficient."""
    state = {"groups_per_step": 8, "committed": 0, "uncommitted": 8, "decodable": 10}
    return worth_starting(**(state | changed), cost=cost or measured(0.02, 0.001, [1, 2, 4, 8, 16]))


def test_a_step_that_lacks_groups_starts_them() -> None:
    assert starting(uncommitted=7, decodable=500)
    assert starting(committed=3, uncommitted=4, decodable=500)


def test_running_ahead_pays_for_an_inefficient_generator() -> None:
    assert starting()
    assert not starting(decodable=21)
    # The engine was busy on average: what starts now would not save what it costs to compute it again.
    assert not starting(measured(0.02, 0.001, [1, 10, 64, 64, 64]))


def test_an_idle_cell_starts_groups_whatever_they_cost() -> None:
    assert starting(measured(0.0, 0.001, [1, 64]), decodable=0)


def test_nothing_starts_on_weights_that_are_about_to_change() -> None:
    assert not starting(committed=8, uncommitted=0, decodable=0)


@given(
    fixed=st.floats(1e-3, 1.0),
    per_sequence=st.floats(1e-3, 0.1),
    counts=st.sets(st.integers(1, 512), min_size=2),
)
def test_the_measured_cost_gives_the_knee(fixed: float, per_sequence: float, counts: set[int]) -> None:
    ones = [n for n in sorted(counts) for _ in range(25)]
    cost = measured(fixed, per_sequence, ones)
    if cost.efficient_sequences:  # else the counts lie too close together
        assert cost.efficient_sequences == pytest.approx(fixed / per_sequence, rel=1e-3)
    assert min(counts) <= cost.mean_sequences <= max(counts)


def test_a_cost_that_measurements_do_not_tell() -> None:
    assert DecodeCost().efficient_sequences == 0.0
    assert DecodeCost().mean_sequences == 0.0
    assert measured(0.1, 0.0, [64, 64, 63, 62]).efficient_sequences == 0.0
    assert measured(0.1, 0.0, [1, 8, 64]).efficient_sequences > 1e6


def test_steps_that_were_held_up_do_not_count() -> None:
    cost = measured(0.02, 0.001, [1, 4, 16, 64] * 10)
    for n in (64, 16, 1):
        cost.add(n, 30.0)
    assert cost.efficient_sequences == pytest.approx(20, rel=0.01)


def test_the_cost_follows_a_machine_that_changes() -> None:
    cost = measured(0.02, 0.001, [1, 8, 32] * 25)
    for n in [1, 8, 32] * 25:
        cost.add(n, 0.08 + 0.001 * n)
    assert cost.efficient_sequences == pytest.approx(80, rel=0.01)
