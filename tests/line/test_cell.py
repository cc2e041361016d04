"""The cell beside other processes."""

from __future__ import annotations

import time

import pytest
import torch
from line_cases import settings

from headrace.line import cell as cell_module
from headrace.line.cell import Cell
from headrace.line.setup import prepare
from headrace.schedule import ThreadShare
from headrace.schedule.threads import WINDOW_S
from headrace.trainer import Trainer


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
        trainer = Trainer(workplace.model.module, config.algorithm, config.trainer, config.line.steps)
        cell = Cell(workplace.engine, trainer, config.line.decode_steps)
        started = time.monotonic()
        while time.monotonic() - started < 1.2 * WINDOW_S:
            cell.adapt_threads(share)
    assert len(readings) == 2
    assert torch.get_num_threads() == share.threads == 1
