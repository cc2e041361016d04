"""A line that dies anywhere goes on from its journal: nothing twice, nothing lost, the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from line_cases import KillAt, Killed, check_books, environment_file, lines_of, settings

from headrace import Line, Observer
from headrace.config import Config
from headrace.errors import RunError, UserError
from headrace.line.replay import replay
from headrace.line.retake import Retake
from headrace.runs.events import AttemptEnded, decode
from headrace.runs.folder import RunFolder
from headrace.state.journal import Journal

COUNTING = """
    def tasks(self, split):
        return [{"prompt": f"task {i}", "high": 5} for i in range(50)]

    def reset(self, task):
        self.turn = 0
        return f"say something, {task['prompt']}"

    def step(self, action):
        self.turn += 1
        answer = [{"role": "user", "content": f"turn {self.turn}: {len(action.text)}"}]
        return {"observation": {"messages": answer}, "reward": len(action.text) % 3, "done": self.turn == 3}
"""


def conversations(folder: Path, **line: Any) -> Config:
    return settings(
        environment={"name": environment_file(folder, COUNTING)},
        sampling={"max_tokens": 4},
        engine={"context_length": 512},
        line={"checkpoint_every": 2, "wait_timeout_s": 20.0} | line,
    )


def check_replay(run_dir: Path) -> None:
    replayed = replay(run_dir)
    assert replayed
    assert all(step.equal for step in replayed)
    assert [step.step for step in replayed] == [m["step"] for m in lines_of(run_dir, "metrics.jsonl")]


def events(run_dir: Path, kind: str) -> list[Any]:
    journal = Journal.open(run_dir / "journal.sqlite", read_only=True)
    try:
        return [event for stored in journal.read() for event in decode(stored.body, stored.payload, (kind,))]
    finally:
        journal.close()


def test_a_run_replays_to_the_same_bits(tmp_path: Path) -> None:
    config = settings(line={"steps": 3})
    Line.from_config(config, tmp_path / "run").run()
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")}
    check_replay(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")} == before


def test_a_replay_sees_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes from what the journal holds, and tells where that is not what was trained."""
    config = settings(line={"steps": 2})
    Line.from_config(config, tmp_path / "run").run()
    read = decode

    def other(body: bytes, payload: bytes | None = None, kinds: Any = None) -> Any:
        for event in read(body, payload, kinds):
            if isinstance(event, AttemptEnded):
                event = replace(event, reward=1.0 - event.reward + random.Random(str(event.id)).random())
            yield event

    monkeypatch.setattr("headrace.line.resume.decode", other)
    assert not all(step.equal for step in replay(tmp_path / "run"))


@pytest.mark.parametrize("make", ["rewards", "conversations"])
@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_killed_at_any_unit(tmp_path: Path, make: str, checkpoint_every: int) -> None:
    """It dies again and again, and in the end nothing was trained twice, lost or left unaccounted for."""
    if make == "rewards":
        config = settings(line={"steps": 6, "checkpoint_every": checkpoint_every}, sampling={"max_tokens": 9})
    else:
        config = conversations(tmp_path, checkpoint_every=checkpoint_every)
    rng = random.Random(checkpoint_every)
    kills = 0
    resume = False
    while True:
        line = Line.resume(tmp_path / "run") if resume else Line.from_config(config, tmp_path / "run")
        try:
            line.run(KillAt(rng.randrange(3, 9) if kills < 5 else 10**6))
            break
        except Killed:
            resume, kills = True, kills + 1
    assert kills >= 2
    check_books(tmp_path / "run", config)
    check_replay(tmp_path / "run")
    # A unit that was interrupted takes its tokens along; none was here, since lines die between two units.
    assert sum(m["ledger_lost"] for m in lines_of(tmp_path / "run", "metrics.jsonl")) == 0


def test_kills_do_not_change_what_is_sampled(tmp_path: Path) -> None:
    """With one group at a time the run is the same to the bit, killed or not."""
    config = settings(line={"groups_per_step": 1, "max_staleness": 0, "steps": 3}, sampling={"max_tokens": 9})
    Line.from_config(config, tmp_path / "whole").run()
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "killed").run(KillAt(9))
    with pytest.raises(Killed):
        Line.resume(tmp_path / "killed").run(KillAt(7))
    Line.resume(tmp_path / "killed").run()
    digests = [[step.digest for step in events(tmp_path / run, "step")] for run in ("whole", "killed")]
    assert digests[0] == digests[1]


def test_tokens_of_an_interrupted_unit_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(line={"steps": 2, "decode_steps": 4}, sampling={"max_tokens": 9})
    noted: list[int] = []
    note = RunFolder.note_generated

    def note_and_die(self: RunFolder, tokens: int) -> None:
        note(self, tokens)
        noted.append(tokens)
        if len(noted) == 6:
            raise Killed

    monkeypatch.setattr(RunFolder, "note_generated", note_and_die)
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run()
    monkeypatch.undo()
    recorded = sum(drawn.tokens for drawn in events(tmp_path / "run", "tokens"))
    assert recorded < noted[-1]
    Line.resume(tmp_path / "run").run()
    check_books(tmp_path / "run", config)
    assert sum(m["ledger_lost"] for m in lines_of(tmp_path / "run", "metrics.jsonl")) == noted[-1] - recorded
    check_replay(tmp_path / "run")


def test_a_damaged_journal_costs_what_came_after_it(tmp_path: Path) -> None:
    config = settings(line={"steps": 6, "checkpoint_every": 1}, sampling={"max_tokens": 9})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAt(20))
    path = tmp_path / "run" / "journal.sqlite"
    for leftover in tmp_path.glob("run/journal.sqlite-*"):
        leftover.unlink()
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(Killed):
        Line.resume(tmp_path / "run").run(KillAt(5))
    Line.resume(tmp_path / "run").run()
    assert (tmp_path / "run" / "journal.sqlite.damaged-1").exists()
    check_books(tmp_path / "run", config)
    with pytest.raises((UserError, RunError)):
        replay(tmp_path / "run")


@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_what_a_resume_takes_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int
) -> None:
    take_again = Retake.contributions

    def slowly(self: Retake) -> None:
        take_again(self)
        monkeypatch.setattr(time, "perf_counter", lambda now=time.perf_counter: now() + 100.0)

    monkeypatch.setattr(Retake, "contributions", slowly)
    config = settings(line={"steps": 12, "checkpoint_every": checkpoint_every}, sampling={"max_tokens": 9})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAt(30))
    Line.resume(tmp_path / "run").run()
    for line in lines_of(tmp_path / "run", "metrics.jsonl"):
        parts = sum(line[f"time_{name}_s"] for name in ("decode", "gradient", "optimizer", "publish", "idle"))
        assert parts <= line["time_step_s"]


class Listening(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)


def test_a_missing_count_of_tokens_is_told(tmp_path: Path) -> None:
    config = settings(line={"steps": 3}, sampling={"max_tokens": 9})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAt(12))
    (tmp_path / "run" / "tokens_generated").unlink()
    observer = Listening()
    Line.resume(tmp_path / "run").run(observer)
    assert any("the count of generated tokens is missing" in text for text in observer.said)
    check_books(tmp_path / "run", config)


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories.jsonl"])
def test_log_lines_that_are_missing_are_told(tmp_path: Path, name: str) -> None:
    config = settings(line={"steps": 8, "checkpoint_every": 4}, sampling={"max_tokens": 9})

    class KillAfterStep(Listening):
        def on_step(self, metrics: dict[str, Any]) -> None:
            if metrics["step"] == 5:
                raise Killed

    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAfterStep())
    path = tmp_path / "run" / name
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if json.loads(line)["step"] <= 2]
    path.write_bytes(b"".join(kept))
    observer = Listening()
    Line.resume(tmp_path / "run").run(observer)
    assert f"{name} ends at step 2: its lines up to step 4 are missing, and stay so" in observer.said
    assert sorted({line["step"] for line in lines_of(tmp_path / "run", name)}) == [1, 2, 5, 6, 7, 8]


def test_another_runs_journal_is_set_aside(tmp_path: Path) -> None:
    for name, task in (("run", {}), ("other", {"seed": 7})):
        config = settings(line={"steps": 6, "checkpoint_every": 2, **task}, sampling={"max_tokens": 9})
        with pytest.raises(Killed):
            Line.from_config(config, tmp_path / name).run(KillAt(30))
    for leftover in tmp_path.glob("run/journal.sqlite*"):
        leftover.unlink()
    for path in tmp_path.glob("other/journal.sqlite*"):
        (tmp_path / "run" / path.name).write_bytes(path.read_bytes())
    observer = Listening()
    Line.resume(tmp_path / "run").run(observer)
    assert any("belongs to another run" in text for text in observer.said)
    assert (tmp_path / "run" / "journal.sqlite.damaged-1").exists()
    check_books(
        tmp_path / "run", settings(line={"steps": 6, "checkpoint_every": 2}, sampling={"max_tokens": 9})
    )


@pytest.mark.parametrize("make", ["rewards", "conversations"])
def test_processes_killed_at_random_instants(tmp_path: Path, make: str) -> None:
    """Real processes and SIGKILL, wherever they happen to be."""
    if make == "rewards":
        config = settings(line={"steps": 12, "checkpoint_every": 3}, sampling={"max_tokens": 12})
    else:
        config = conversations(tmp_path, steps=8, checkpoint_every=3)
    run_dir = tmp_path / "run"
    with RunFolder.create(run_dir, config):
        pass
    code = "import sys\nfrom headrace import Line\nLine.resume(sys.argv[1]).run()"
    rng, kills = random.Random(7), 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], start_new_session=True)
        deadline = time.monotonic() + 120
        wait_s = 2.5 + 1.5 * rng.random() if kills < 2 else 120.0
        while process.poll() is None and wait_s > 0 and time.monotonic() < deadline:
            time.sleep(0.05)
            wait_s -= 0.05
        if process.poll() is not None:
            assert process.returncode == 0
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills, "the run ended before it could be killed"
    check_books(run_dir, config)
    check_replay(run_dir)
