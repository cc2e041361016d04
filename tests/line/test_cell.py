"""The cell beside other processes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from line_cases import settings

from headrace.line import cell as cell_module
from headrace.line.cell import LocalCell
from headrace.line.setup import prepare
from headrace.schedule import ThreadShare
from headrace.schedule.threads import WINDOW_S
from headrace.schedule.units import POLICY, Assignment, Decode, PolicyVersion, Request
from headrace.trainer import Trainer
from headrace.types import Sampling, TrajectoryId


@pytest.fixture
def threads() -> int:
    """Torch's number of threads, put back afterwards."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_the_cores_are_read_once_in_a_window(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    readings: list[float] = []

    def busy_neighbour() -> float:
        readings.append(time.monotonic())
        return 2 * readings[-1]

    monkeypatch.setattr(cell_module, "cpu_seconds_of_others", busy_neighbour)
    config = settings()
    share = ThreadShare(cores=2, most=2)
    with prepare(config) as workplace:
        trainer = Trainer(workplace.model.module, workplace.algorithm, config.trainer, config.line.steps)
        policy = PolicyVersion(POLICY, 0, "w")
        said: list[str] = []
        cell = LocalCell(policy, workplace.engine, trainer, share=share, report=said.append)
        started = time.monotonic()
        number = 0
        while time.monotonic() - started < 1.2 * WINDOW_S:
            cell.start(Assignment(number, cell.name, cell.incarnation, Decode((), 1)))
            assert [outcome.number for outcome in cell.wait(0.0)] == [number]
            number += 1
    assert len(readings) == 2
    assert torch.get_num_threads() == share.threads == 1
    assert len(said) == 1


def test_nothing_is_drawn_for_a_group_of_newer_weights() -> None:
    with prepare(settings()) as workplace:
        cell = LocalCell(PolicyVersion(POLICY, 3, "w"), workplace.engine, None)
        key = TrajectoryId(0, 0, 0)
        request = Request(key, (1, 2), Sampling(max_tokens=2), 2, 7, (0,), 4, False)
        with pytest.raises(RuntimeError, match="admitted at version 4, and this cell holds version 3"):
            cell.run(Decode((key,), 1, (request,)))
        drawn = cell.run(Decode((key,), 2, (replace(request, admitted_version=3),))).drawn
        assert [len(one.ids) for one in drawn] == [2]
