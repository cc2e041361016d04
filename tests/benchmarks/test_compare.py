"""Two checkouts compared: the interval of the median, what it says, and which process measures which checkout."""

import random
from pathlib import Path

import pytest

from benchmarks import compare, paired, peers


def test_the_interval_is_the_sign_tests():
    assert paired.interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0, pytest.approx(1 - 2 / 64))
    # Table of the sign test at 95 %: of 10 values the 2nd and the 9th, of 20 the 6th and the 15th.
    assert paired.interval(range(1, 11))[:2] == (2, 9)
    assert paired.interval(range(1, 21))[:2] == (6, 15)
    assert paired.interval([1.0]) == (1.0, 1.0, 0.0)


def test_the_interval_holds_the_median_as_often_as_it_says():
    rng = random.Random(0)
    held, rounds = 0, 4000
    for _ in range(rounds):
        low, high, confidence = paired.interval([rng.lognormvariate(0.0, 1.0) for _ in range(9)])
        held += low <= 1.0 <= high
    assert held / rounds == pytest.approx(confidence, abs=0.015)
    assert confidence >= paired.CONFIDENCE


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.98, 1.0, 1.02, 0.97, 0.99, 1.1], "not below 0.97"),
        ([0.96, 0.9, 0.95, 0.969, 0.93, 0.94], "below"),
        ([0.98, 1.0, 1.02, 0.96, 0.99, 1.1], "undecided"),
        ([1.1] * 5, "undecided"),  # too few to be sure
        ([0.5], "undecided"),
        ([1.0] * 8 + [0.5], "not below 0.97"),  # one pair was disturbed
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(ratios: list[float], verdict: str):
    assert paired.verdict(ratios) == verdict


def test_pairs_are_measured_in_turn_and_the_order_changes(monkeypatch: pytest.MonkeyPatch):
    this, other = compare.Checkout(Path("this")), compare.Checkout(Path("other"))
    asked: list[compare.Checkout] = []

    def measure(checkout: compare.Checkout) -> float:
        asked.append(checkout)
        return 2.0 if checkout is this else 3.0

    monkeypatch.setitem(compare.MEASURES, "start", measure)
    assert compare.compare("start", this, other, pairs=3) == [1.5, 1.5, 1.5]
    assert asked == [other, this, this, other, other, this]


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    compare.Checkout(peers.BENCHMARKS.parent).check()
    with pytest.raises(peers.PeerError, match="is no checkout of headrace"):
        compare.Checkout(tmp_path).check()
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), "no_such_row"])
    assert "there is no row no_such_row; there are generate_8" in capsys.readouterr().err
