"""The next units, over every small state of a line, for one cell and for several."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule import DecodeCost, UnitKind, plan, worth_starting
from headrace.schedule.matching import OpenContribution, PendingGroup, Wanted
from headrace.schedule.units import (
    POLICY,
    CellView,
    Contribute,
    Decode,
    Gradient,
    OptimizerStep,
    PolicyVersion,
    Publish,
    Score,
    Unit,
)
from headrace.types import TrajectoryId

MICRO_BATCH = 4
VERSION = 3
NOW = PolicyVersion(POLICY, VERSION, "w")


@dataclass(frozen=True)
class Counts:
    """A line at one moment."""

    groups_per_step: int = 2
    committed: int = 0
    pending: tuple[PendingGroup, ...] = ()
    gradients_out: int = 0
    contributions: tuple[OpenContribution, ...] = ()
    probed: bool = False
    compared_tokens: int = 0
    wanted: tuple[Wanted, ...] = ()
    micro_batch_tokens: int = MICRO_BATCH
    decode_steps: int = 8
    whole_batch: bool = False
    policy: PolicyVersion = NOW


CELL = CellView("cell-0", 0, VERSION, True, 0, None)


def wanted(*versions: int) -> tuple[Wanted, ...]:
    return tuple(Wanted(TrajectoryId(i, 0, 0), version) for i, version in enumerate(versions))


def only(counts: Counts, cell: CellView = CELL) -> Unit | None:
    """The unit of a line's only cell."""
    planned = plan(counts, [cell])
    return planned[0][1] if planned else None


def every_state(b: int) -> Iterator[tuple[Counts, CellView]]:
    for committed in range(b + 1):
        for pending in range(committed + 1):
            for size, unfinished, new, probed, whole in product(
                (1, MICRO_BATCH), (0, 3), (0, 2), (False, True), (False, True)
            ):
                groups = tuple(PendingGroup(i, size) for i in range(pending))
                yield (
                    Counts(
                        groups_per_step=b,
                        committed=committed,
                        pending=groups,
                        probed=probed,
                        wanted=wanted(*[VERSION] * new),
                        whole_batch=whole,
                    ),
                    replace(CELL, unfinished=unfinished),
                )


@pytest.mark.parametrize("groups_per_step", [1, 2, 3])
def test_every_state_of_one_cell(groups_per_step: int) -> None:
    for counts, cell in every_state(groups_per_step):
        unit = only(counts, cell)
        full = counts.committed == counts.groups_per_step
        decodable = bool(cell.unfinished or counts.wanted)
        may_take = bool(counts.pending) and (full or not counts.whole_batch)
        enough = sum(group.tokens for group in counts.pending) >= MICRO_BATCH
        if full and not counts.pending:
            assert isinstance(unit, OptimizerStep if counts.probed else Score), (
                "a whole step is finished first"
            )
        elif may_take and (full or enough):
            assert isinstance(unit, Gradient), "a full micro-batch goes before decoding"
        elif decodable:
            assert isinstance(unit, Decode), "a small piece of gradient does not interrupt decoding"
            assert [key for key in unit.wanted] == [one.id for one in counts.wanted]
        elif may_take:
            assert isinstance(unit, Gradient), "never idle while something can run"
        else:
            assert unit is None


def test_a_gradient_takes_the_oldest_groups_of_about_a_micro_batch() -> None:
    groups = (PendingGroup(7, 3), PendingGroup(2, 1), PendingGroup(5, 1))
    unit = only(Counts(groups_per_step=3, committed=3, pending=groups))
    assert isinstance(unit, Gradient)
    assert (unit.groups, unit.version) == ((7, 2), VERSION)
    large = only(Counts(committed=1, pending=(PendingGroup(1, 99), PendingGroup(2, 1))))
    assert isinstance(large, Gradient)
    assert large.groups == (1,), "a group that is larger is taken alone"


def test_a_cell_that_lags_takes_the_version_up_first() -> None:
    behind = replace(CELL, version=VERSION - 1, unfinished=5)
    assert only(Counts(wanted=wanted(1)), behind) == Publish(NOW)


@given(
    versions=st.lists(st.integers(0, VERSION), max_size=9),
    cells=st.lists(st.tuples(st.integers(0, VERSION), st.booleans()), min_size=1, max_size=4),
)
def test_the_version_fence(versions: list[int], cells: list[tuple[int, bool]]) -> None:
    """A busy cell that lags gets only what its own version may draw; nothing is given out twice."""
    views = [
        replace(
            CELL,
            name=f"cell-{i}",
            version=version,
            optimizer=i == 0,
            unfinished=1,
            depth=2,
            busy=(UnitKind.DECODE,) if busy else (),
        )
        for i, (version, busy) in enumerate(cells)
    ]
    counts = Counts(wanted=wanted(*versions))
    given_out: list[Any] = []
    for view, unit in plan(counts, views):
        if isinstance(unit, Decode):
            assert all(versions[key.group] <= view.version for key in unit.wanted)
            given_out += unit.wanted
        if isinstance(unit, Gradient):
            assert view.version == VERSION
    assert len(set(given_out)) == len(given_out)
    newest = max((view.version for view in views if view.busy or view.version == VERSION), default=-1)
    drawable = {Wanted(TrajectoryId(i, 0, 0), v).id for i, v in enumerate(versions) if v <= newest}
    assert set(given_out) <= drawable


def test_a_step_of_several_cells_waits_for_every_contribution() -> None:
    here = OpenContribution(0, "cell-0", 0, received=True)
    there = OpenContribution(1, "cell-1", 0, received=False)
    other = replace(CELL, name="cell-1", optimizer=False)
    counts = Counts(committed=2, probed=True, contributions=(here, there))
    assert plan(counts, [CELL, other]) == [(other, Contribute(1))]
    counts = replace(counts, contributions=(here, there._replace(received=True)))
    assert plan(counts, [CELL, other]) == [(CELL, OptimizerStep(VERSION, (0, 1)))]
    assert not plan(replace(counts, gradients_out=1), [CELL]), "a gradient that is out is waited for"


def test_one_unit_may_queue_behind_the_running_one() -> None:
    remote = replace(CELL, depth=2, unfinished=4)
    running = replace(remote, busy=(UnitKind.DECODE,))
    assert isinstance(only(Counts(), running), Decode)
    assert only(Counts(), replace(running, busy=(UnitKind.DECODE, UnitKind.DECODE))) is None
    assert only(Counts(), replace(running, depth=1)) is None
    assert only(Counts(), replace(running, busy=(UnitKind.OPTIMIZER_STEP,))) is None


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
