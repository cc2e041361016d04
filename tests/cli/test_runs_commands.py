"""`headrace runs` and `headrace state` tell what a journal holds: finished, stopped, running or damaged."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_cases import (
    TWO_GROUPS,
    Call,
    Moves,
    admit,
    close,
    commit,
    earlier_format,
    folded,
    frames,
    one,
    rebased,
    record,
    settings,
    start,
    step,
    tokens,
    world,
    write,
)

from headrace.config import Config
from headrace.line import replay as replaying
from headrace.line.retake import RetakenStep
from headrace.runs import events
from headrace.runs import transcript as transcripts
from headrace.runs.events import TokensLost
from headrace.runs.folder import RunFolder
from headrace.runs.history import History
from headrace.runs.reading import LIGHT_KINDS, read_history
from headrace.runs.state import RunState, Status
from headrace.schedule import Bucket
from headrace.state.journal import Journal
from headrace.types import TrajectoryId


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "runs" / "one", settings(), TWO_GROUPS)


def history_of(path: Path, **options: Any) -> History:
    return read_history(RunFolder.open(path, read_only=True), **options)


def refused(called: Any, *says: str) -> None:
    assert called.code == 2, called
    assert called.err.startswith("error: ")
    assert called.err.count("\n") == 1
    assert all(part in called.err for part in says), called.err


# What a journal comes to


def test_attempts_are_followed_from_admission_to_their_bucket(run: Path) -> None:
    history = history_of(run)
    summary = {
        str(key): (
            attempt.status,
            attempt.reward,
            attempt.tokens,
            attempt.oldest_version,
            attempt.step,
            attempt.bucket,
        )
        for key, attempt in history.attempts.items()
    }
    assert summary == {
        "0.0.0": (Status.REWARDED, 1.0, 2, 0, 1, Bucket.TRAINED),
        "0.1.0": (Status.FAILED, None, 2, 0, None, Bucket.ENVIRONMENT_FAILED),
        "0.1.1": (Status.REWARDED, 0.0, 4, 0, 1, Bucket.TRAINED),
        "1.0.0": (Status.DECODING, None, 3, 1, None, None),
        "1.1.0": (Status.AT_ENVIRONMENT, None, 2, 1, None, None),
    }
    assert sum(attempt.tokens for attempt in history.attempts_in_flight) == 5
    assert [group.outstanding for group in history.groups.values()] == [False, True]


@pytest.mark.parametrize(
    ("rewards", "buckets"),
    [
        ((1.0, 1.0), (Bucket.ZERO_ADVANTAGE, Bucket.ZERO_ADVANTAGE)),
        ((1.0, 1.0), (Bucket.TRAINED, Bucket.TRAINED)),
        ((1.0, 0.0), (Bucket.TRAINED, Bucket.MASKED)),
    ],
)
def test_tokens_end_where_the_trainer_puts_them(
    tmp_path: Path, rewards: tuple[float, float], buckets: tuple[Bucket, Bucket]
) -> None:
    """The trainer's word is recorded, so settings need not be read to know it."""
    config = settings()
    events = [
        start(config),
        admit(0),
        tokens(0, ("0.0.0", "4", "stop"), ("0.1.0", "5", "length")),
        world("0.0.0", rewards[0]),
        world("0.1.0", rewards[1]),
        commit(0),
        step(1, 0, buckets=buckets, advantages=(0.7, -0.7)),
    ]
    history = history_of(write(tmp_path / "run", config, events))
    assert tuple(attempt.bucket for attempt in history.attempts.values()) == buckets
    assert [attempt.advantage for attempt in history.attempts.values()] == [0.7, -0.7]


def test_a_closed_group_goes_where_it_was_closed_to(tmp_path: Path) -> None:
    failed = [
        tokens(1, ("1.0.0", "x", "stop")),
        world("1.0.0", None, error="it died"),
        tokens(1, ("1.0.1", "x", "stop")),
        world("1.0.1", None, error="it died again"),
    ]
    events = [*TWO_GROUPS, world("1.1.0", 1.0), *failed, close(1, Bucket.DROPPED_STALE)]
    history = history_of(write(tmp_path / "run", settings(), events))
    assert history.attempts[TrajectoryId(1, 1, 0)].bucket is Bucket.DROPPED_STALE
    for attempt in (0, 1):
        gone = history.attempts[TrajectoryId(1, 0, attempt)]
        assert (gone.status, gone.bucket) == (Status.FAILED, Bucket.ENVIRONMENT_FAILED)
    assert not any(group.outstanding for group in history.groups.values())
    assert not list(history.attempts_in_flight)


def say(text: str, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text}], "tools": []}


def conversation(config: Config) -> Moves:
    return [
        start(config, multi_turn=True),
        admit(0, task={"secret": 7}),
        world("0.0.0", 0.0, observation=say("guess a number"), done=False),
        world("0.1.0", 0.0, observation=say("guess a number"), done=False),
        tokens(0, ("0.0.0", "3", "stop"), ("0.1.0", "1", "stop")),
        world("0.0.0", 0.25, observation=say("higher"), done=False),
        world("0.1.0", 0.25, observation=say("higher"), done=False),
        tokens(0, ("0.0.0", "7", "stop"), ("0.1.0", "2", "stop")),
        world("0.0.0", 1.0),
    ]


@pytest.mark.parametrize("limit", ["turns", "context"])
def test_conversations_earn_in_every_turn_and_end_at_a_limit(tmp_path: Path, limit: str, call: Call) -> None:
    config = settings()
    if limit == "turns":
        config = settings(environment={"max_turns": 2})
    path = write(
        tmp_path / "run",
        config,
        [
            *conversation(config),
            world("0.1.0", 0.5, observation=say("higher"), done=False, cut=limit == "turns"),
        ],
    )
    history = history_of(path)
    done, cut = history.attempts.values()
    assert (done.status, done.reward, done.turns, done.oldest_version) == (Status.REWARDED, 1.25, 2, 0)
    if limit == "turns":
        assert (cut.status, cut.reward) == (Status.REWARDED, 0.75)
    else:
        assert cut.status is Status.DECODING
        later = [
            *conversation(config),
            world("0.1.0", 0.5, observation=say("higher"), done=False, cut=True),
        ]
        path = write(tmp_path / "later", config, [*later, commit(0)])
        cut = history_of(path).attempts[TrajectoryId(0, 1, 0)]
        assert (cut.status, cut.reward, cut.finish_reason) == (Status.REWARDED, 0.75, "length")
    assert call("pull", "tiny-random").code == 0  # its tokenizer
    called = call("runs", "trajectories", path, "--show", "0.0.0")
    assert called.code == 0, called.err
    order = [
        '[task]\n{"secret": 7}',
        "[world]\nuser: guess a number",
        "[policy]\n3\n(1 tokens, stop)",
        "[reward]\n0.25\n",
        "[world]\nuser: higher",
        "[policy]\n7\n(1 tokens, stop)",
        "[reward]\n1\n",
        "[reward]\n1.25 in all",
    ]
    places = [called.out.index(text) for text in order]
    assert places == sorted(places)


def test_what_has_ended_is_shown_without_a_tokenizer(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text stands in the journal: nothing is looked for, and no library is loaded."""

    def asked(folder: RunFolder) -> None:
        raise AssertionError("a tokenizer is looked for")

    monkeypatch.setattr(transcripts, "_decoder", asked)
    config = settings()
    path = write(tmp_path / "run", config, conversation(config))
    called = call("runs", "trajectories", path, "--show", "0.0.0")
    assert called.code == 0, called.err
    assert called.out.count("[policy]") == 2


def test_a_journal_that_goes_on_from_a_checkpoint(tmp_path: Path, call: Call) -> None:
    """A journal that goes on from a checkpoint knows what the checkpoint knew, and what came later."""
    before = folded([start(settings()), step(1, 0), step(2, 1), admit(2), tokens(2, ("2.0.0", "a", None))])
    events = [start(settings()), rebased(before), tokens(2, ("2.0.0", "bc", "stop")), step(3, 2)]
    path = write(tmp_path / "run", settings(), events)
    history = history_of(path)
    assert list(history.groups) == [2]
    attempt = history.attempts[TrajectoryId(2, 0, 0)]
    assert (attempt.step, attempt.tokens) == (3, 3)
    assert "what is 2 + 2?" in call("runs", "trajectories", path, "--show", "2.0.0").out


def test_what_was_said_before_the_checkpoint_is_shown_from_it(tmp_path: Path, call: Call) -> None:
    """A journal that was begun anew after damage knows earlier groups as the checkpoint holds them."""
    before = [
        start(settings()),
        step(1, 0),
        admit(1),
        tokens(1, ("1.0.0", "abc", "stop"), ("1.1.0", "d", None)),
        world("1.0.0", 1.0),
    ]
    later = [start(settings()), tokens(1, ("1.1.0", "e", "stop")), world("1.1.0", 0.0), step(2, 1)]
    path = write(tmp_path / "run", settings(), [rebased(folded(before)), *later])
    history = history_of(path)
    attempts = {str(one.id): (one.step, one.reward, one.tokens) for one in history.attempts.values()}
    assert attempts == {"1.0.0": (2, 1.0, 3), "1.1.0": (2, 0.0, 2)}
    assert history.accounted == folded(before).ledger.generated + 1
    called = call("runs", "trajectories", path, "--show", "1.0.0")
    assert "[task]\nwhat is 1 + 1?" in called.out
    assert "[policy]\nabc\n(3 tokens in 1 turns, before this journal begins)" in called.out
    called = call("runs", "trajectories", path, "--show", "1.1.0")
    assert "[policy]\nde\n(2 tokens, stop)" in called.out


def test_steps_that_only_the_metrics_know(tmp_path: Path, call: Call) -> None:
    path = write(tmp_path / "run", settings(), TWO_GROUPS)
    (path / "journal.sqlite").unlink()
    assert list(history_of(path).steps) == [1]
    assert call("runs", "show", path).code == 0
    refused(call("runs", "trajectories", path), "no journal.sqlite")


# The commands


def test_list(run: Path, call: Call) -> None:
    write(run.parent / "two", settings(), [start(settings())])
    (run.parent / "no run").mkdir()
    (run.parent / "odd").mkdir()
    (run.parent / "odd" / "config.toml").write_text("[modle]\n")
    called = call("runs", "list")
    assert called.code == 0, called.err
    lines = {line.split()[1]: line for line in called.out.splitlines() if line.startswith("│")}
    assert set(lines) == {"one", "two", "odd"}
    assert "1/3" in lines["one"]
    assert "0.500" in lines["one"]
    assert "killed" in lines["one"]
    assert "seconds ago" in lines["one"]
    assert "0/3" in lines["two"]
    assert "settings cannot be read" in lines["odd"]
    assert call("runs", "list", run.parent).out == called.out


def test_a_run_that_goes_on_is_read_and_left_alone(run: Path, call: Call) -> None:
    with RunFolder.open(run) as folder:
        journal = Journal.open(folder.journal_path)
        state = folded(TWO_GROUPS)
        record(journal, [world("1.1.0", 1.0)], state)
        before = {
            file.name: file.stat().st_mtime_ns for file in run.iterdir() if file.name != "journal.sqlite-shm"
        }
        for arguments in (["list"], ["show", run], ["trajectories", run]):
            called = call("runs", *arguments)
            assert called.code == 0, called.err
        assert "running" in call("runs", "list").out
        assert "running" in call("state", run).out
        assert before == {
            file.name: file.stat().st_mtime_ns for file in run.iterdir() if file.name != "journal.sqlite-shm"
        }
        # The writer goes on as if nobody had looked.
        rest = [tokens(1, ("1.0.0", "x", "stop")), world("1.0.0", 1.0), commit(1)]
        record(journal, rest, state)
        journal.close()
    assert "running" not in call("runs", "list").out


def test_show(run: Path, call: Call) -> None:
    called = call("runs", "show", run)
    assert called.code == 0, called.err
    for text in ("tiny-random", "arithmetic", "1 groups of 2", "1 of 3 steps", "0.500", "4.5", "100%"):
        assert text in called.out
    ledger = {line.split()[0]: line.split()[1:] for line in called.out.splitlines() if line.startswith("  ")}
    assert ledger["trained"] == ["6", "66.7%"]
    assert ledger["environment_failed"] == ["2", "22.2%"]
    assert ledger["in"] == ["flight", "1", "11.1%"]
    assert "zero_advantage" not in ledger


def test_show_the_last_steps(tmp_path: Path, call: Call) -> None:
    config = settings(line={"steps": 50})
    path = write(
        tmp_path / "run", config, [start(config), *(step(n, n - 1, reward=n / 100) for n in range(1, 41))]
    )
    shown = call("runs", "show", path).out
    assert "0.400" in shown
    assert "0.200" not in shown
    assert "the last 20 of 40 steps" in shown
    assert "0.010" in call("runs", "show", path, "--steps", 0).out


def test_trajectories(run: Path, call: Call) -> None:
    def ids(*arguments: object) -> list[str]:
        called = call("runs", "trajectories", run, *arguments)
        assert called.code == 0, called.err
        return [line.split()[1] for line in called.out.splitlines() if line.startswith("│")]

    assert ids() == ["0.0.0", "0.1.0", "0.1.1", "1.0.0", "1.1.0"]
    assert ids("--step", 1) == ["0.0.0", "0.1.1"]
    assert ids("--group", 1) == ["1.0.0", "1.1.0"]
    assert ids("--best", 1) == ["0.0.0"]
    assert ids("--worst", 1) == ["0.1.1"]
    assert ids("--worst", 9) == ["0.1.1", "0.0.0"]
    out = call("runs", "trajectories", run).out
    assert "what" in out
    assert "at environment" in out
    assert "environment_failed" in out


def test_one_trajectory_as_text(run: Path, call: Call) -> None:
    assert call("pull", "tiny-random").code == 0  # its tokenizer
    called = call("runs", "trajectories", run, "--show", "0.1.1")
    assert called.code == 0, called.err
    assert "0.1.1: rewarded, reward 0, 4 tokens in 1 turns, consumed by step 1, trained" in called.out
    for text in ("[task]\nwhat is 0 + 0?", "[policy]\nfish\n", "(4 tokens, length)", "[reward]\n0\n"):
        assert text in called.out
    failed = call("runs", "trajectories", run, "--show", "0.1.0").out
    assert "[error]\nthe worker died" in failed
    assert failed.count("the worker died") == 1
    assert "not ended yet" in call("runs", "trajectories", run, "--show", "1.0.0").out


def test_text_without_a_tokenizer_is_the_recorded_one(tmp_path: Path, call: Call) -> None:
    config = settings(model={"name": "owner/never-fetched"})
    path = write(tmp_path / "run", config, TWO_GROUPS)
    assert "[policy]\nfish\n" in call("runs", "trajectories", path, "--show", "0.1.1").out
    unfinished = call("runs", "trajectories", path, "--show", "1.0.0").out
    assert f"[{ord('a')}, {ord('b')}, {ord('c')}]" in unfinished


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "list", "nowhere"], ["nowhere: no such folder"]),
        (["runs", "list", "empty"], ["holds no runs"]),
        (["runs", "show", "empty"], ["is not a run folder"]),
        (["runs", "replay", "empty"], ["is not a run folder"]),
        (["state", "empty"], ["is not a run folder"]),
        (["runs", "trajectories", "runs/one", "--step", "9"], ["no step 9", "1 to 1"]),
        (["runs", "trajectories", "runs/one", "--group", "9"], ["no group 9", "0 to 1"]),
        (["runs", "trajectories", "runs/one", "--show", "1.2"], ["group.sample.attempt"]),
        (["runs", "trajectories", "runs/one", "--show", "1.2.3"], ["no such trajectory", "1.0.0, 1.1.0"]),
        (["runs", "trajectories", "runs/one", "--show", "8.2.3"], ["groups 0 to 1"]),
        (["runs", "trajectories", "runs/one", "--best", "1", "--worst", "1"], ["not both"]),
    ],
)
def test_wrong_calls(arguments: list[str], says: list[str], run: Path, call: Call) -> None:
    (run.parent.parent / "empty").mkdir()
    refused(call(*arguments), *says)


@pytest.fixture
def damaged(run: Path) -> Path:
    database = sqlite3.connect(run / "journal.sqlite")
    database.execute("UPDATE records SET kind = 'other' WHERE seq = 7")
    database.commit()
    database.close()
    return run


def test_a_damaged_journal_is_read_up_to_the_damage(damaged: Path, call: Call) -> None:
    assert "stopped, damaged" in call("runs", "list").out
    for arguments in (["runs", "show"], ["runs", "trajectories"], ["state"]):
        called = call(*arguments, damaged)
        assert called.code == 0, called.err
        assert "damaged from record 7 on: its checksum is wrong" in called.out
    history = history_of(damaged)
    assert history.records == 6
    assert history.attempts[TrajectoryId(0, 0, 0)].reward == 1.0
    assert TrajectoryId(1, 0, 0) not in history.attempts
    # The step stands in the metrics too.
    assert "1/3" in call("runs", "list").out


def test_what_is_no_database_is_damaged(run: Path, call: Call) -> None:
    (run / "journal.sqlite").write_bytes(b"no database" * 900)
    assert "stopped, damaged" in call("runs", "list").out
    assert "damaged from record 1 on" in call("runs", "show", run).out
    (run / "journal.sqlite").write_bytes(b"")
    assert "stopped, damaged" in call("runs", "list").out


def test_state(run: Path, call: Call) -> None:
    with RunFolder.open(run) as folder:
        for number, size in ((0, 10), (1, 3000)):
            folder.checkpoint_path(number).mkdir()
            (folder.checkpoint_path(number) / "model.safetensors").write_bytes(bytes(size))
    called = call("state", run)
    assert called.code == 0, called.err
    for text in (
        "killed",
        "checkpoints/step-1",
        "2.9 KB",
        "12 records",
        "the last event is said",
        "version 1",
        "weights1",
        "1 groups outstanding, the first due at version 1",
        "1 trajectories to decode, 1 at their environment, 0 rewarded",
        "5 tokens in flight, 0 lost",
    ):
        assert text in called.out, text
    Journal.set_aside(run / "journal.sqlite")
    out = call("state", run).out
    assert "journal.sqlite.damaged-1" in out
    assert "none" in out


def test_state_tells_which_kv_lies_where(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.state import report

    path = write(tmp_path / "run", settings(), [start(settings())])
    assert "not used (engine.kv_host_mb = 0)" in call("state", path).out
    config = settings(engine={"kv_host_mb": 8, "kv_disk_mb": 16, "kv_disk_folder": str(tmp_path / "kv")})
    path = write(tmp_path / "with tiers", config, [start(config)])
    out = call("state", path).out
    assert "0 B of 8 MB, 0 blocks" in out
    assert "0 B of 16 MB, 0 blocks" in out
    asked: list[Any] = []

    def kv_report(shared_name: str, folder: Path) -> list[dict[str, Any]]:
        asked.extend((shared_name, folder))
        item = {"tier": "disk", "place": "x", "blocks": 3, "bytes": 2048, "kinds": {}, "last_used": 0.0}
        return [item | {"identity": f"{number:032x}"} for number in range(7)]

    monkeypatch.setattr(report, "kv_report", kv_report)
    out = call("state", path).out
    assert asked[1] == tmp_path / "kv"
    assert "14.0 KB of 16 MB, 21 blocks" in out
    assert "and 2 more" in out


def test_lost_tokens_are_told(tmp_path: Path, call: Call) -> None:
    path = write(tmp_path / "run", settings(), [start(settings()), one(TokensLost(12)), step(1, 0, lost=12)])
    assert "12 lost in crashes" in call("state", path).out
    assert "lost " in call("runs", "show", path).out


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RetakenStep]]:
    steps: list[RetakenStep] = []

    def replay(run_dir: Path, on_step: Callable[[RetakenStep], None]) -> list[RetakenStep]:
        for step_ in steps:
            on_step(step_)
        return steps

    monkeypatch.setattr(replaying, "replay", replay)
    return steps


def test_replay_says_equal_or_differs(run: Path, call: Call, replays: list[RetakenStep]) -> None:
    replays[:] = [RetakenStep(1, "aaaa", "aaaa"), RetakenStep(2, "bbbb", "bbbb")]
    called = call("runs", "replay", run)
    assert called.code == 0, called.err
    assert [line.split()[:3] for line in called.out.splitlines()[:2]] == [
        ["step", "1", "equal"],
        ["step", "2", "equal"],
    ]
    assert "2 steps, all equal" in called.out
    replays[1] = RetakenStep(2, "bbbb", "cccc")
    called = call("runs", "replay", run)
    assert called.code == 1
    assert "bbbb was recorded, cccc came out" in called.out
    assert "1 of 2 steps differ, the first is step 2" in called.out


def test_steps_of_other_kernels_are_not_checkable(run: Path, call: Call, replays: list[RetakenStep]) -> None:
    replays[:] = [RetakenStep(1, "aaaa", "aaaa"), RetakenStep(2, "bbbb", "cccc", checkable=False)]
    called = call("runs", "replay", run)
    assert called.code == 0, called.err
    assert "not checkable here: other kernels" in called.out
    assert "1 steps equal, 1 not checkable here" in called.out


def test_a_run_of_an_earlier_version_is_told_in_one_line(run: Path, call: Call) -> None:
    old = write(run.parent / "old", settings(), TWO_GROUPS)
    earlier_format(old / "journal.sqlite")
    called = call("runs", "list", run.parent)
    assert called.code == 0, called.err
    rows = {line.split()[1]: line for line in called.out.splitlines() if line.startswith("│")}
    assert "of an earlier version" in rows["old"]
    assert "1/3" in rows["one"]
    for arguments in (["runs", "show"], ["runs", "trajectories"], ["state"]):
        refused(call(*arguments, old), "earlier version of headrace", "format 1", "begin a new one")


# What reading costs


def opcodes(function: Callable[[], Any]) -> int:
    """How many instructions of Python a call takes."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


def test_a_groups_attempts_are_found_without_looking_at_the_others() -> None:
    """So all of them together take time in proportion to their number."""

    def of(groups: int) -> History:
        config = settings(line={"steps": groups})
        history, state = History(), RunState()
        for seq, frame in enumerate(frames([start(config), *(step(n + 1, n) for n in range(groups))], state)):
            assert isinstance(frame, list)
            history.add(seq + 1, 0.0, frame)
        assert len(history.groups) == groups
        return history

    few, many = of(20), of(2_000)
    assert len(many.of_group(1_234)) == 2
    cost = opcodes(lambda: few.of_group(12))
    assert opcodes(lambda: many.of_group(1_234)) == cost
    assert opcodes(lambda: many.attempts) < 110 * opcodes(lambda: few.attempts)


def test_an_overview_makes_no_events_of_other_kinds(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = history_of(run)
    decoders = dict(events._DECODERS)

    def refuse(row: list[Any]) -> Any:
        raise AssertionError(f"a {row[0]} is made")

    refusing = {kind: decoders[kind] if kind in LIGHT_KINDS else refuse for kind in decoders}
    monkeypatch.setattr(events, "_DECODERS", refusing)
    light = history_of(run, light=True)
    assert (light.steps, light.starts, light.records) == (whole.steps, whole.starts, whole.records)
    assert (light.last, light.tail) == (whole.last, whole.tail)
    assert not light.groups


def test_the_commands_agree_with_a_real_run(trained: tuple[Path, Any], call: Call) -> None:
    """A run that was trained: its journal, its logs and the commands say the same."""
    path, done = trained
    assert done.code == 0, done
    assert "complete" in call("runs", "list", path.parent).out
    history = history_of(path)
    lines = [json.loads(line) for line in (path / "trajectories.jsonl").read_text().splitlines()]
    assert lines
    for line in lines:
        attempt = history.attempts[TrajectoryId(line["group"], line["sample"], line["attempt"])]
        assert (attempt.reward, attempt.step, attempt.tokens) == (
            line["reward"],
            line["step"],
            sum(line["sampled"]),
        )
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [one.metrics["reward_mean"] for one in history.steps.values()] == [
        m["reward_mean"] for m in metrics
    ]
    for bucket in (Bucket.TRAINED, Bucket.ZERO_ADVANTAGE):
        settled = sum(a.tokens for a in history.attempts.values() if a.bucket is bucket)
        assert settled == sum(m[f"ledger_{bucket}"] for m in metrics)
    first = lines[0]
    name = f"{first['group']}.{first['sample']}.{first['attempt']}"
    shown = call("runs", "trajectories", path, "--show", name)
    assert shown.code == 0, shown.err
    assert first["task"]["prompt"] in shown.out
    called = call("runs", "replay", path)
    assert called.code == 0, called
    assert called.out.count("equal") == len(metrics) + 1
