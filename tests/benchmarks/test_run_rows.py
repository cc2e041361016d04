"""Rows that watch `headrace train`: publishes, the controller, the first token, and whether memory stays flat."""

from pathlib import Path

import pytest

from benchmarks import controller, memory, peers, publish, runs, start


def test_a_publish_is_a_share_of_its_own_step_and_the_first_is_a_warm_up():
    steps = [(0.9, 1.0), (0.02, 2.0), (0.02, 1.0), (0.12, 4.0)]
    metrics = [{"time_publish_s": p, "time_step_s": s} for p, s in steps]
    row = publish.row("publish", metrics)
    assert row.headrace == pytest.approx(0.02)
    assert row.met
    assert row.details["shares"] == pytest.approx([0.01, 0.02, 0.03])
    assert publish.row("publish_int8", metrics).ratio == pytest.approx(2.5)


def test_the_controller_takes_what_no_unit_took_and_the_first_step_is_a_warm_up():
    steps = [(3.0, 10), (0.02, 300), (0.04, 700)]
    metrics = [{"time_other_s": s, "time_step_s": 2.0, "tokens_generated": tokens} for s, tokens in steps]
    row = controller.row(metrics)
    assert row.headrace == pytest.approx(0.06 / 1000)
    assert row.met
    assert controller.row([*metrics, metrics[0]]).met is False


def test_the_first_token_is_the_first_that_a_run_notes(tmp_path: Path):
    file = tmp_path / "tokens_generated"
    assert start.sampled(file) == 0
    for text, tokens in (("", 0), (f"{0:020d}\n", 0), (f"{64:020d}\n", 64)):
        file.write_text(text, encoding="ascii")
        assert start.sampled(file) == tokens


def test_a_run_that_ends_before_its_first_token_is_an_error():
    with pytest.raises(peers.PeerError, match="start: the run ended with exit code"):
        start.time_to_first_token(runs.ADDITION, ["line.unknown=1"])


def test_a_start_is_timed_and_its_run_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seconds = start.time_to_first_token(runs.ADDITION, ["model.name=tiny-random"])
    assert 0 < seconds < start.TIMEOUT_S
    assert not list(tmp_path.iterdir())


def test_flat_memory_is_judged_after_the_warm_up():
    values = [100.0] * memory.WARM_UP + [200.0] * 74 + [206.0] * 76
    row = memory.row(values)
    assert row.headrace == pytest.approx((203.04 - 200) / 203.04)
    assert row.met
    assert memory.row([*values, 230.0]).met is False


def test_memory_that_falls_is_not_flat_either():
    assert memory.strays([100.0, 100.0, 70.0]) == pytest.approx(2 / 9)


def test_a_small_run_learns_and_tells_its_memory():
    values = memory.small_run(steps=2)
    assert len(values) == 2
    assert all(value > 50 for value in values)
