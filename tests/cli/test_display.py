"""The displays: what a recorded console shows."""

from __future__ import annotations

import io
import logging
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.cli.console import logged, say
from headrace.line.display import (
    LiveDisplay,
    LogDisplay,
    clock,
    evaluation_text,
    make_display,
    reward_curve,
    sparkline,
    step_line,
)
from headrace.line.observer import LineStatus
from headrace.runs.results import EvaluatedTask, Evaluation

STATUS = LineStatus(
    step=2,
    steps=15,
    doing="decode",
    reward_history=(0.25, 0.5),
    decode_tokens_per_s=1234.4,
    train_tokens_per_s=0.0,
    staleness_mean=0.5,
    decoding=48,
    at_environment=3,
    ready=1,
    committed=5,
    groups_per_step=8,
    seconds_left=125.0,
)
METRICS: dict[str, Any] = {
    "step": 3,
    "reward_mean": 0.75,
    "loss": -0.01234,
    "grad_norm": 1.5,
    "staleness_mean": 0.25,
    "mismatch_ess": 1.0,
    "tokens_generated": 800,
    "tokens_trained": 0,
    "time_decode_s": 2.0,
    "time_gradient_s": 0.0,
    "time_step_s": 5.0,
}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, _environ={"TERM": "xterm"})


def text(recorded: Console) -> str:
    assert isinstance(recorded.file, io.StringIO)
    return recorded.file.getvalue()


def evaluation(rewards: list[float | None]) -> Evaluation:
    valid = [reward for reward in rewards if reward is not None]
    return Evaluation(
        step=0,
        reward=sum(valid) / len(valid) if valid else math.nan,
        tasks=[EvaluatedTask("p", "c", reward) for reward in rewards],
        failed=len(rewards) - len(valid),
    )


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ([], 10, ""),
        ([0.3], 10, "▅"),
        ([2.0, 2.0, 2.0], 10, "▅▅▅"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 10, "▁▂▃▄▅▆▇█"),
        ([math.nan], 10, " "),
        ([0.0, math.nan, math.inf, 1.0], 10, "▁  █"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([0, 0, 7, math.nan], 2, "▁█"),
        ([1.0], 0, ""),
    ],
)
def test_sparkline(values: list[float], width: int, shown: str) -> None:
    assert sparkline(values, width) == shown


@given(st.lists(st.floats(allow_subnormal=False, width=32), max_size=300), st.integers(1, 50))
def test_a_sparkline_has_its_width_and_never_fails(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_a_long_rising_history_still_rises() -> None:
    curve = sparkline([i / 1000 for i in range(1000)], 40)
    assert len(curve) == 40
    assert list(curve) == sorted(curve)
    assert (curve[0], curve[-1]) == ("▁", "█")


def test_rewards_between_0_and_1_keep_that_scale() -> None:
    assert reward_curve([0.0, 0.14], 10) == "▁▂"
    assert reward_curve([-1.0, 3.0], 10) == "▁█"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "0 s"), (59.7, "1:00"), (185, "3:05"), (3723, "1:02:03")]
)
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_evaluation_text_counts_failures_apart() -> None:
    assert evaluation_text(evaluation([1.0, 0.0])) == "0.500 on 2 tasks"
    assert evaluation_text(evaluation([1.0, None])) == "1.000 on 1 tasks; the environment failed on 1 more"
    assert "failed on all of 2" in evaluation_text(evaluation([None, None]))
    assert evaluation_text(evaluation([])) == "not measured"


def test_the_console_decides() -> None:
    assert isinstance(make_display(console(True)), LiveDisplay)
    assert isinstance(make_display(console(False)), LogDisplay)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display(dumb), LogDisplay)


def test_live_display_shows_the_run_and_messages_above_it() -> None:
    recorded = console(True)
    with make_display(recorded, "runs/addition-001") as display:
        display.on_message("task 3 is skipped")
        display.on_status(STATUS)
        display.announce("stopping soon")
        assert isinstance(display, LiveDisplay)
        plain = Console(file=io.StringIO(), width=100)
        plain.print(display.render())
        shown = text(plain)
        display.on_evaluation("before", evaluation([1.0, 0.0]))
        display.on_step(METRICS)
    for part in (
        "runs/addition-001",
        "2 of 15",
        "about 2:05 left",
        "▃▅  0.500",
        "generator 1,234 tok/s, trainer –, staleness 0.50",
        "generating; 48 in the engine, 3 at the environment, 1 groups ready, 5 of 8 committed",
        "stopping soon",
    ):
        assert part in shown, shown
    everything = text(recorded)
    assert "task 3 is skipped" in everything
    assert "held-out reward before training: 0.500 on 2 tasks" in everything
    # What stays knows of the step after the last status.
    last = everything[everything.rindex("runs/addition-001") :]
    assert "3 of 15" in last
    assert "0.750" in last
    assert everything.rindex("\x1b[?25h") > everything.rindex("\x1b[?25l")


def test_live_display_says_what_it_waits_on_before_and_after_the_steps() -> None:
    display = LiveDisplay(console(True))
    assert "preparing" in display._activity()
    display.on_status(replace(STATUS, doing="waiting on 7 rewards"))
    assert display._activity().startswith("waiting on 7 rewards; ")
    display.on_step({**METRICS, "step": 15})
    assert "finishing" in display._activity()


def test_log_display_writes_one_line_per_step_and_message() -> None:
    recorded = console(False)
    with make_display(recorded, "runs/addition-001") as display:
        display.on_status(STATUS)
        display.on_message("a [bracket] stays, and a long line is not broken: " + "x" * 200)
        display.on_step(METRICS)
        display.announce("stopping soon")
    lines = text(recorded).splitlines()
    assert lines[0] == "run folder runs/addition-001"
    assert lines[1].startswith("a [bracket] stays")
    assert lines[1].endswith("x" * 200)
    assert lines[2] == step_line(METRICS, 15)
    assert lines[3:] == ["stopping soon"]


LONE = "half a pair: \ud800, and é"


def strict(terminal: bool, encoding: str = "utf-8") -> Console:
    """A console on a stream that refuses what it cannot encode, as a real one does."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=stream, force_terminal=terminal, width=100, _environ={"TERM": "xterm"})


def written(recorded: Console) -> str:
    assert isinstance(recorded.file, io.TextIOWrapper)
    assert isinstance(recorded.file.buffer, io.BytesIO)
    return recorded.file.buffer.getvalue().decode()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_display_shows_what_cannot_be_encoded_escaped(terminal: bool) -> None:
    recorded = strict(terminal)
    with make_display(recorded, "runs/\udcff") as display:
        display.on_status(STATUS)
        display.on_message(LONE)
    assert "half a pair: \\ud800, and é" in written(recorded)
    assert "runs/\\udcff" in written(recorded)


def test_commands_say_what_cannot_be_encoded_escaped() -> None:
    say(recorded := strict(False), LONE)
    assert written(recorded) == "half a pair: \\ud800, and é\n"
    say(recorded := strict(False, "ascii"), LONE)
    assert written(recorded) == "half a pair: \\ud800, and \\xe9\n"
    recorded = strict(False)
    with logged(recorded):
        logging.getLogger("headrace.test").info(LONE)
    assert "\\ud800" in written(recorded)


def test_a_step_line() -> None:
    assert step_line(METRICS, 15) == (
        "step 3/15  reward 0.750  loss -0.0123  grad norm 1.5  staleness 0.25  "
        "generated 800 tokens at 400/s  trained 0 tokens  5.0 s  about 1:00 left"
    )
    assert "left" not in step_line(METRICS, 3)
    assert "  mismatch ESS 0.93  " in step_line({**METRICS, "mismatch_ess": 0.931}, 15)
    assert "mismatch" not in step_line({**METRICS, "mismatch_ess": None}, 15)


def test_a_silent_log_says_what_it_is_doing() -> None:
    recorded = console(False)
    with LogDisplay(recorded, heartbeat_s=0.3) as display:
        display.on_status(replace(STATUS, doing="waiting on 7 rewards"))
        deadline = time.monotonic() + 5
        while "waiting on 7 rewards" not in text(recorded):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    with LogDisplay(quiet := console(False), heartbeat_s=60):
        time.sleep(0.3)
    assert text(quiet) == ""
