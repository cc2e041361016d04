"""Row `trl`: the time to a reward level, the level both sides are held to, and TRL's job."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.trl import (
    CONFIG,
    WINDOW,
    Curve,
    Run,
    busy_row,
    common_level,
    compare,
    memory_row,
    peer_job,
    time_row,
)
from headrace.config import Config

RISING = Curve(seconds=(1.0, 2.0, 4.0, 8.0, 16.0), rewards=(0.0, 0.3, 0.9, 0.9, 0.9))

curves = st.lists(
    st.tuples(st.floats(0.1, 100), st.integers(0, 64).map(lambda right: right / 64)),
    min_size=WINDOW,
    max_size=20,
).map(lambda steps: Curve(*(tuple(column) for column in zip(*steps, strict=True))))


def test_the_level_is_the_mean_of_three_steps_up_to_it():
    assert RISING.levels == pytest.approx([0.4, 0.7, 0.9])


def test_time_runs_from_the_start_to_the_end_of_the_step_that_reached_the_level():
    assert (RISING.steps_to(0.7), RISING.time_to(0.7)) == (4, 15.0)
    assert (RISING.steps_to(0.9), RISING.time_to(0.9)) == (5, 31.0)


def test_no_level_is_reached_before_a_whole_window():
    assert RISING.time_to(0.0) == 7.0


def test_a_level_never_reached_has_no_time():
    assert RISING.time_to(0.91) is None
    assert RISING.steps_to(0.91) is None


def test_a_level_counts_when_it_was_reached_first_even_if_it_fell_again():
    curve = Curve(seconds=(1.0,) * 5, rewards=(1.0, 1.0, 1.0, 0.0, 0.0))
    assert curve.time_to(0.9) == 3.0


def test_both_sides_are_held_to_the_target_when_both_reach_it():
    assert common_level(RISING, RISING, 0.5) == 0.5


def test_else_to_the_highest_level_that_both_reached():
    lower = Curve(seconds=(3.0,) * 4, rewards=(0.2, 0.5, 0.5, 0.8))
    result = compare(RISING, lower, 0.9)
    assert result["level"] == pytest.approx(0.6)
    assert not result["target_reached_by_both"]
    assert result["headrace"]["seconds_to_level"] == 15.0
    assert result["trl"]["seconds_to_level"] == 12.0
    assert result["ratio"] == pytest.approx(12 / 15)


def test_a_curve_without_a_whole_window_is_refused():
    with pytest.raises(ValueError, match="at least 3 steps"):
        common_level(RISING, Curve(seconds=(1.0, 1.0), rewards=(1.0, 1.0)), 0.9)


@given(curves, curves, st.floats(0, 1))
def test_any_two_curves_have_times_to_one_level_at_most_the_target(ours: Curve, theirs: Curve, target: float):
    result = compare(ours, theirs, target)
    assert result["level"] <= target
    assert result["ratio"] > 0
    for name, curve in (("headrace", ours), ("trl", theirs)):
        steps = result[name]["steps_to_level"]
        assert sum(curve.rewards[steps - WINDOW : steps]) / WINDOW >= result["level"] - 1e-9
        assert all(mean < result["level"] for mean in curve.levels[: steps - WINDOW])
        assert result[name]["seconds_to_level"] == pytest.approx(sum(curve.seconds[:steps]))


def test_a_curve_is_read_from_lines_that_may_hold_more(tmp_path: Path):
    lines = [{"step": i, "time_step_s": 2.0 * i, "reward_mean": i / 4, "loss": None} for i in (1, 2)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert Curve.read(path) == Curve(seconds=(2.0, 4.0), rewards=(0.25, 0.5))


def test_trl_gets_the_settings_and_the_tasks_of_the_example():
    config = Config.load(CONFIG)
    job = peer_job(config, Path("model"), steps=15, micro_batch=64)
    assert (job["groups_per_step"], job["group_size"], job["max_tokens"]) == (8, 8, 24)
    assert (job["temperature"], job["learning_rate"], job["schedule"]) == (1.0, 1e-5, "constant")
    assert (job["loss_type"], job["scale_rewards"], job["kl_coef"]) == ("dapo", "group", 0)
    assert (job["clip_low"], job["clip_high"]) == (0.2, 0.28)
    assert len(job["tasks"]) == 15 * 8
    assert all(task["prompt"].startswith("What is ") for task in job["tasks"])
    json.dumps(job)


STEP = {
    "time_step_s": 10.0,
    "time_decode_s": 5.0,
    "time_gradient_s": 4.5,
    "time_optimizer_s": 0.2,
    "time_publish_s": 0.1,
    "time_idle_s": 0.0,
    "time_other_s": 0.2,
}


def test_the_time_row_is_about_the_level_that_both_reached():
    slower = Curve(seconds=(10.0,) * 5, rewards=RISING.rewards)
    row = time_row("trl", Run(RISING, 1.0, []), Run(slower, 1.0, []), "TRL", {"steps": 5})
    assert (row.headrace, row.peer, row.ratio) == (31.0, 50.0, pytest.approx(50 / 31))
    assert row.met is False
    assert "mean reward 0.90" in row.what
    assert row.details["steps"] == 5


def test_less_memory_is_better():
    row = memory_row(Run(RISING, 2000.0, []), Run(RISING, 3000.0, []), "TRL", {})
    assert row.ratio == 1.5
    assert row.met


def test_busy_is_decode_and_gradient_time_over_all_step_time():
    idle = STEP | {"time_step_s": 30.0, "time_idle_s": 20.0}
    assert busy_row([STEP], {}).headrace == pytest.approx(0.95)
    assert busy_row([STEP], {}).met
    row = busy_row([STEP, idle], {})
    assert row.headrace == pytest.approx(19 / 40)
    assert row.met is False
    assert sum(row.details["shares"].values()) == pytest.approx(1.0)
