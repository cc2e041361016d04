"""How runs are found, how they ended, and that one odd run is told and hides no other."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import command
from run_cases import (
    TWO_GROUPS,
    Call,
    Moves,
    admit,
    checkpoint,
    folded,
    rebased,
    settings,
    start,
    step,
    stop,
    tokens,
    world,
    write,
)

from headrace.errors import EnvironmentFailure
from headrace.line.handle import Line
from headrace.line.observer import Observer
from headrace.line.retake import RetakenStep
from headrace.runs.folder import RunFolder
from headrace.runs.reading import read_history


def row(called: Any, name: str) -> list[str]:
    """The cells of a run's row in a table, folded ones joined."""
    assert called.code == 0, called
    cells: list[str] = []
    for line in called.out.splitlines():
        if line.startswith("│"):
            parts = [part.strip() for part in line.strip("│").split("│")]
            if parts[0] == name:
                cells = parts
            elif cells and not parts[0]:
                cells = [f"{a} {b}".strip() for a, b in zip(cells, parts, strict=True)]
            elif cells:
                break
    assert cells, called.out
    return cells


def refused(called: Any, *says: str) -> None:
    assert called.code == 2, called
    assert called.err.startswith("error: ")
    assert called.err.count("\n") == 1
    assert all(part in called.err for part in says), called.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "runs" / "one", settings(), TWO_GROUPS)


# Odd runs


def _config_folder(run: Path) -> None:
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()


def _metrics_folder(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def _metrics_text(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":99,"reward_mean":"abc"}\n')


def _metrics_step(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step":-4,"reward_mean":1.0}\n')


def _journal_folder(run: Path) -> None:
    (run / "journal.sqlite").unlink()
    (run / "journal.sqlite").mkdir()


def _evaluation_folder(run: Path) -> None:
    (run / "evaluation-after.json").mkdir()


def _evaluation_text(run: Path) -> None:
    (run / "evaluation-before.json").write_text('{"step": 0, "reward": "abc", "tasks": [], "failed": 0}')


ODD = {
    "config.toml cannot be read": _config_folder,
    "metrics.jsonl cannot be read": _metrics_folder,
    "metrics.jsonl: reward_mean of step 99 is no number": _metrics_text,
    "metrics.jsonl has a step -4": _metrics_step,
    "journal.sqlite cannot be read": _journal_folder,
    "evaluation-after.json cannot be read": _evaluation_folder,
    "evaluation-before.json: its reward is no number": _evaluation_text,
}


@pytest.mark.parametrize("says", ODD)
def test_an_odd_run_is_told_and_hides_no_other(says: str, run: Path, call: Call) -> None:
    odd = write(run.parent / "odd", settings(), TWO_GROUPS)
    ODD[says](odd)
    called = call("runs", "list")
    assert row(called, "odd")[4] == says
    assert row(called, "one")[1:3] == ["1/3", "0.500"]
    refused(call("runs", "show", odd), "odd: ", says, "mend it")
    assert "Traceback" not in call("state", odd).err


def test_a_journal_of_another_form_is_told(run: Path, call: Call) -> None:
    odd = write(run.parent / "odd", settings(), [start(settings()), ("step", '[["step",1]]')], logs=False)
    says = "record 2 (step) of journal.sqlite is not as this version of headrace writes it"
    called = call("runs", "list")
    assert row(called, "odd")[4] == says
    assert row(called, "one")[1] == "1/3"
    refused(call("runs", "show", odd), says)


def test_the_count_of_tokens_that_cannot_be_read_is_told(run: Path, call: Call) -> None:
    (run / "tokens_generated").mkdir()
    refused(call("state", run), "tokens_generated cannot be read")


def test_recorded_text_stands_in_the_journal(tmp_path: Path, call: Call) -> None:
    config = settings(model={"name": "owner/never-fetched"})
    path = write(tmp_path / "run", config, TWO_GROUPS)
    (path / "trajectories.jsonl").mkdir()
    assert "[policy]\nfish" in call("runs", "trajectories", path, "--show", "0.1.1").out


# Names


@pytest.mark.parametrize("arguments", [["runs", "show"], ["runs", "trajectories"], ["state"]])
def test_a_name_from_the_list_is_found(arguments: list[str], run: Path, call: Call) -> None:
    called = call(*arguments, "one")
    assert called.code == 0, called.err
    assert called.out == call(*arguments, "runs/one").out
    both = "neither here nor in runs/"
    refused(call(*arguments, "two"), "two is not a run folder", both)
    assert both not in call(*arguments, "runs/two").err


def test_a_folder_here_comes_first(run: Path, call: Call) -> None:
    write(run.parent.parent / "one", settings(line={"steps": 7}), [start(settings())])
    assert "0 of 7 steps" in call("runs", "show", "one").out


def test_replay_finds_it_too(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.line import replay as replaying

    asked = []

    def replay(run_dir: Path, on_step: Callable[[RetakenStep], None]) -> list[RetakenStep]:
        asked.append(run_dir)
        return []

    monkeypatch.setattr(replaying, "replay", replay)
    assert call("runs", "replay", "one").code == 0
    assert asked == [run]


# Held-out reward


def test_held_out_reward_is_told(run: Path, call: Call) -> None:
    def evaluate(name: str, reward: float | None) -> None:
        task = {"prompt": "p", "completion": "c", "reward": reward}
        data = {"step": 0, "reward": reward, "tasks": [task], "failed": int(reward is None)}
        (run / f"evaluation-{name}.json").write_text(json.dumps(data))

    def held_out() -> str:
        return row(call("runs", "list"), "one")[3]

    assert held_out() == ""
    assert call("runs", "show", run).out.count("not measured") == 2
    evaluate("before", 0.25)
    assert held_out() == "0.250 before"
    evaluate("after", 0.75)
    assert held_out() == "0.750 after"
    out = call("runs", "show", run).out
    assert "held-out before  0.250 on 1 tasks" in out
    assert "held-out after   0.750 on 1 tasks" in out
    header = call("runs", "list").out.splitlines()[1]
    assert "last reward" in header
    evaluate("after", None)
    assert held_out() == "unknown after"


# How runs ended

CONFIG = settings(line={"steps": 4, "checkpoint_every": 2})
STARTED: Moves = [start(CONFIG), admit(0), tokens(0, ("0.0.0", "4", "stop"))]
CHECKPOINT = checkpoint(2)
TWO_STEPS: Moves = [*STARTED, step(1, 0), admit(1), step(2, 1)]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "killed"),
        (STARTED, "killed"),
        (TWO_STEPS, "killed"),
        ([*TWO_STEPS, CHECKPOINT], "killed"),  # the one that is due every two steps
        ([*TWO_STEPS, stop()], "killed"),
        ([*TWO_STEPS, stop(), CHECKPOINT], "stopped"),
        ([*TWO_STEPS, stop(), CHECKPOINT, start(CONFIG)], "killed"),
        (
            [*TWO_STEPS, CHECKPOINT, admit(2), tokens(2, ("2.0.0", "4", "stop")), CHECKPOINT],
            "failed",
        ),
        ([*TWO_STEPS, CHECKPOINT, CHECKPOINT], "failed"),
        ([*TWO_STEPS, rebased(), CHECKPOINT], "killed"),
        ([*TWO_STEPS, rebased(), start(CONFIG), CHECKPOINT], "killed"),
    ],
)
def test_the_last_events_say_how_a_run_ended(tmp_path: Path, events: Moves, state: str, call: Call) -> None:
    path = write(tmp_path / "runs" / "one", CONFIG, events)
    if CHECKPOINT in events:
        (path / "checkpoints" / "step-2").mkdir()
    assert row(call("runs", "list"), "one")[4] == state
    assert f"{state}, " in call("runs", "show", "one").out
    assert call("state", "one").out.startswith(f"runs/one: {state}\n")


def test_a_checkpoint_that_never_became_whole_is_no_stop(tmp_path: Path, call: Call) -> None:
    write(tmp_path / "runs" / "one", CONFIG, [*TWO_STEPS, stop(), CHECKPOINT])
    assert row(call("runs", "list"), "one")[4] == "killed"


def test_a_run_that_is_to_go_further_was_not_killed(tmp_path: Path, call: Call) -> None:
    done = settings(line={"steps": 2})
    path = write(tmp_path / "runs" / "one", CONFIG, [start(done), step(1, 0), step(2, 1), CHECKPOINT])
    (path / "checkpoints" / "step-2").mkdir()
    assert row(call("runs", "list"), "one")[4] == "killed"  # before its final model was whole
    (path / "final").mkdir()
    assert row(call("runs", "list"), "one")[4] == "stopped"


def test_numbers_that_stopped_a_run_failed_it(tmp_path: Path, call: Call) -> None:
    path = write(tmp_path / "runs" / "one", CONFIG, TWO_STEPS)
    with RunFolder.open(path) as folder:
        offenders = folder.save_offenders(3, [], "the loss is not finite")
    assert row(call("runs", "list"), "one")[4] == "failed"
    os.utime(offenders, (1.0, 1.0))  # of an earlier start
    assert row(call("runs", "list"), "one")[4] == "killed"


def test_without_a_journal_nobody_knows(run: Path, call: Call) -> None:
    (run / "journal.sqlite").unlink()
    assert row(call("runs", "list"), "one")[4] == "stopped, no journal"


def test_an_environment_that_breaks_fails_the_run(config: Path, call: Call) -> None:
    config.with_name("tasks.py").write_text(
        "from pathlib import Path\n"
        "class Even:\n"
        "    def tasks(self, split):\n"
        "        return [{'prompt': f'{split} {i}'} for i in range(9)]\n"
        "    def reward(self, task, completion):\n"
        "        if Path(__file__).with_name('broken').exists():\n"
        "            raise ValueError('broken')\n"
        "        return float(len(completion) % 2 == 0)\n"
    )
    line = Line.from_toml(config, ["eval.tasks=0", "line.checkpoint_every=1"], run_dir="runs/one")

    class Breaks(Observer):
        def on_step(self, metrics: Any) -> None:
            config.with_name("broken").touch()

    with pytest.raises(EnvironmentFailure):
        line.run(Breaks())
    assert row(call("runs", "list"), "one")[4] == "failed"


# What the interrupted unit lost


def test_what_the_interrupted_unit_lost_is_told_before_a_resume(run: Path, call: Call) -> None:
    def queue(noted: int | None) -> str:
        if noted is not None:
            (run / "tokens_generated").write_text(f"{noted:020d}\n")
        return str(call("state", run).out.split("queue\n")[1])

    assert "not known: the count of sampled tokens" in queue(None)
    assert "interrupted unit" not in queue(8 + 5)  # 8 up to step 1, and 5 after it
    assert "3 tokens of the interrupted unit are lost" in queue(8 + 5 + 3)
    with RunFolder.open(run):
        assert "interrupted unit" not in queue(None)  # it is being sampled


def test_where_a_part_of_the_journal_is_gone(tmp_path: Path, call: Call) -> None:
    """The checkpoint that stands for it knows: what it says is in the journal where the gap is."""
    before = folded([start(settings()), step(1, 0), admit(1)])
    sampled = before.ledger.generated
    events = [*TWO_GROUPS, rebased(before), start(settings()), tokens(1, ("1.0.0", "abc", None))]
    path = write(tmp_path / "run", settings(), events)
    (path / "tokens_generated").write_text(f"{sampled + 3 + 4:020d}\n")
    assert "4 tokens of the interrupted unit are lost" in call("state", path).out


def test_a_run_that_went_on_after_damage_is_read(config: Path, call: Call) -> None:
    """What stands before the damage is kept, and the rest comes from the checkpoint that the run went on from."""
    Line.from_toml(config, ["eval.tasks=0", "line.checkpoint_every=1"], run_dir="runs/one").run()
    run = Path("runs/one")
    database = sqlite3.connect(run / "journal.sqlite")
    (first,) = next(database.execute("SELECT seq FROM records WHERE kind LIKE '%step%' ORDER BY seq"))
    database.execute("UPDATE records SET at = at + 1 WHERE seq > ?", (first,))
    database.commit()
    database.close()
    settled = (run / "config.toml").read_text()
    (run / "config.toml").write_text(settled.replace("steps = 3", "steps = 4"))
    Line.resume(run).run()
    for arguments in (["runs", "show"], ["runs", "trajectories", "--step", 4], ["state"]):
        called = call(*arguments, run)
        assert called.code == 0, called.err
    with RunFolder.open(run, read_only=True) as folder:
        history = read_history(folder)
    # Steps 2 and 3 are in the metrics alone.
    assert [one.at is None for one in history.steps.values()] == [False, True, True, False]
    assert {one.step for one in history.attempts.values()} == {1, 4}


# What cannot be encoded


def test_what_cannot_be_encoded_is_shown_escaped(tmp_path: Path, environ: dict[str, str]) -> None:
    odd = {"prompt": "what is \ud800?"}
    events = [
        start(settings()),
        admit(0, task=odd),
        tokens(0, ("0.0.0", "a", "stop")),
        world("0.0.0", None, error="no \udfff, said it"),
    ]
    write(tmp_path / "runs" / "one", settings(), events)
    for arguments in (["runs", "trajectories", "one"], ["runs", "trajectories", "one", "--show", "0.0.0"]):
        done = subprocess.run(
            command(arguments),
            cwd=tmp_path,
            env=environ | {"PYTHONIOENCODING": "utf-8:strict", "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "what is \\ud800?" in done.stdout
        if "--show" in arguments:
            assert "no \\udfff, said it" in done.stdout
