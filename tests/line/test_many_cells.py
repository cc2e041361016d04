"""Three cells that answer late, twice, out of order, and die: the bound, the books, exactly once, and progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fold_cases import ToyConversation, config_of, run_toys
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.schedule import Assignments
from headrace.schedule.matching import _Round
from headrace.schedule.units import Outcome

chances = hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def toy_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.line.episodes.Conversation", ToyConversation)


@pytest.mark.parametrize("eta", [0, 1, 2])
@chances
@given(random=st.randoms(use_true_random=False), groups=st.integers(1, 3), multi_turn=st.booleans())
def test_bound_books_once_and_progress(
    eta: int, random: Any, groups: int, multi_turn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_toys(config_of(eta, groups), random, tmp_path_factory.getbasetemp(), multi_turn=multi_turn)


@chances
@given(random=st.randoms(use_true_random=False), groups=st.integers(1, 3), multi_turn=st.booleans())
def test_over_crashes_too(
    random: Any, groups: int, multi_turn: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_toys(config_of(1, groups), random, tmp_path_factory.getbasetemp(), crashes=3, multi_turn=multi_turn)


def finds(random_seed: int, folder: Path) -> bool:
    """Whether a run with these chances goes wrong."""
    import random

    try:
        run_toys(config_of(1, 2, steps=6), random.Random(random_seed), folder)
    except (AssertionError, ValueError, RuntimeError, KeyError):
        return True
    return False


def test_without_the_version_fence_it_goes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = _Round._decode

    def unfenced(self: _Round, cell: Any) -> Any:
        self.wanted = [wanted._replace(admitted_version=0) for wanted in self.wanted]
        return decode(self, cell)

    assert not any(finds(seed, tmp_path) for seed in range(40))
    monkeypatch.setattr(_Round, "_decode", unfenced)
    assert any(finds(seed, tmp_path) for seed in range(40))


def test_without_the_check_of_incarnations_it_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[int, Any] = {}
    take, open_ = Assignments.take, Assignments.open

    def remember(self: Assignments, *args: Any) -> Any:
        assignment = open_(self, *args)
        opened[assignment.number] = assignment
        return assignment

    def any_incarnation(self: Assignments, outcome: Outcome) -> Any:
        return take(self, outcome) or opened.get(outcome.number)

    monkeypatch.setattr(Assignments, "open", remember)
    assert not any(finds(seed, tmp_path) for seed in range(40))
    monkeypatch.setattr(Assignments, "take", any_incarnation)
    assert any(finds(seed, tmp_path) for seed in range(40))
