"""The run folder: it appears whole, has one writer, holds valid JSON; a resume forgets what came later."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import Config
from headrace.errors import RunError, UserError
from headrace.files import atomic_folder
from headrace.locks import try_lock, unlock
from headrace.runs.folder import LOCK_WAIT_S, RunFolder
from headrace.runs.reading import is_running
from headrace.runs.state import Attempt, Settled
from headrace.schedule import Bucket
from headrace.types import Trajectory, TrajectoryId


@pytest.fixture
def config() -> Config:
    return Config.from_dict(
        {
            "model": {"name": "tiny-random"},
            "environment": {"name": "arithmetic", "options": {"operators": ["+", "-"]}},
            "line": {"steps": 7, "max_staleness": 2},
        }
    )


@pytest.fixture
def folder(tmp_path: Path, config: Config) -> Any:
    with RunFolder.create(tmp_path / "run", config) as folder:
        yield folder


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def trajectory(group: int, sample: int, reward: float | None = 1.0, logprob: float = -0.5) -> Trajectory:
    result = Trajectory(TrajectoryId(group, sample, 0), temperature=1.0, reward=reward)
    result.append_observed([1, 2])
    result.append_sampled(3, logprob, version=4)
    result.append_sampled(5, -1.25, version=5)
    result.finish_reason, result.completion = "stop", "seven"
    return result


def consumed(
    step: int, group: int, task: dict[str, Any] | None = None, advantage: float | None = None
) -> list[Settled]:
    """Two samples of a group that a step has trained."""
    samples = [(trajectory(group, 0), None), (trajectory(group, 3, 0.0), advantage)]
    return [
        Settled(Attempt(one.id, one), Bucket.TRAINED, task or {"prompt": "3 + 4?"}, step, its_advantage)
        for one, its_advantage in samples
    ]


def scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Creation, opening, locking


def test_the_settings_come_back(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "runs" / "run"
    with RunFolder.create(path, config) as folder:
        assert folder.path == path
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["run"]
    assert Config.load(path / "config.toml") == config
    with RunFolder.open(path) as again:
        assert again.config == config


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_existing_path_is_refused(tmp_path: Path, config: Config, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run")
    with pytest.raises(UserError, match=r"exists already: pick another --run-dir.*--resume") as error:
        RunFolder.create(tmp_path / "run", config)
    assert "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_an_impossible_path_is_refused(tmp_path: Path, config: Config) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="pick another --run-dir"):
        RunFolder.create(tmp_path / "file" / "run", config)


def test_only_a_run_folder_can_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="is not a run folder"):
            RunFolder.open(path)
    (tmp_path / "config.toml").write_text("[model")
    with pytest.raises(UserError, match="not valid TOML"):
        RunFolder.open(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_one_run_writes_at_a_time(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="another run is writing to"):
        RunFolder.open(folder.path)
    with RunFolder.open(folder.path, read_only=True) as reader:
        assert reader.config == folder.config
        with pytest.raises(RuntimeError, match="read only"):
            reader.append_metrics({"step": 1})
    folder.append_metrics({"step": 1})
    folder.close()
    folder.close()
    with pytest.raises(RuntimeError, match="closed"):
        folder.append_metrics({"step": 2})
    with RunFolder.open(folder.path) as writer:
        writer.append_metrics({"step": 2})
    assert [line["step"] for line in lines(folder.path / "metrics.jsonl")] == [1, 2]


def test_looking_at_a_run_does_not_keep_it_from_starting(folder: RunFolder) -> None:
    folder.close()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            is_running(folder.path)

    looking = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(300):
            RunFolder.open(folder.path).close()
    finally:
        done.set()
        for thread in looking:
            thread.join()


def test_a_lock_that_is_about_to_end_is_waited_for(folder: RunFolder) -> None:
    folder.close()
    with (folder.path / ".lock").open() as lock:
        assert try_lock(lock.fileno(), 0, exclusive=False)
        release = threading.Timer(LOCK_WAIT_S / 6, unlock, (lock.fileno(), 0))
        release.start()
        RunFolder.open(folder.path).close()
        release.join()


def test_a_dead_run_releases_its_folder(folder: RunFolder) -> None:
    folder.close()
    code = (
        "import os, signal, sys, headrace.runs.folder as room\n"
        "folder = room.RunFolder.open(sys.argv[1])\n"
        "(folder.path / 'held').touch()\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdin=subprocess.PIPE) as other:
        while not (folder.path / "held").exists():
            assert other.poll() is None, "the other process failed to start"
        with pytest.raises(UserError, match="another run is writing to"):
            RunFolder.open(folder.path)
        other.send_signal(signal.SIGKILL)
    RunFolder.open(folder.path).close()


def test_fresh_paths_are_above_every_used_number(tmp_path: Path) -> None:
    assert RunFolder.fresh(tmp_path / "runs", "addition") == tmp_path / "runs" / "addition-001"
    for name in ("addition-001", "addition-007", "addition-x", "other-050", "addition-2.log"):
        (tmp_path / name).mkdir()
    assert RunFolder.fresh(tmp_path, "addition") == tmp_path / "addition-008"
    assert not (tmp_path / "addition-008").exists()


# Metrics


def test_metrics_are_valid_json_and_on_the_disk_at_once(folder: RunFolder) -> None:
    folder.append_metrics({"loss": math.nan, "ess": -math.inf, "reward_mean": 0.5, "step": 1, "note": "é"})
    folder.append_metrics({"step": 2, "reward_mean": np.float64(0.75), "n": np.int64(3), "nested": [np.nan]})
    first, second = lines(folder.path / "metrics.jsonl")
    assert first == {"step": 1, "loss": None, "ess": None, "reward_mean": 0.5, "note": "é"}
    assert second == {"step": 2, "reward_mean": 0.75, "n": 3, "nested": [None]}
    for bad in ({}, {"step": None}, {"step": 1.5}):
        with pytest.raises(ValueError, match="whole number `step`"):
            folder.append_metrics(bad)


def test_tensorboard_has_the_finite_numbers(folder: RunFolder) -> None:
    folder.append_metrics({"step": 1, "reward_mean": 0.5, "loss": math.nan, "note": "x", "done": True})
    folder.append_metrics({"step": 2, "reward_mean": 0.75, "loss": 2, "none": None})
    assert scalars(folder) == {"reward_mean": [(1, 0.5), (2, 0.75)], "loss": [(2, 2.0)]}


def test_a_full_disk_is_one_clear_line(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write metrics\.jsonl in .*No space left.*--resume") as error:
        folder.append_metrics({"step": 1})
    assert "\n" not in str(error.value)


# Trajectories


def test_trajectories_are_readable(folder: RunFolder) -> None:
    task = {"prompt": "3 + 4?", "answer": np.int64(7), "weird": {1: object, "nan": math.nan}, "t": (1, 2)}
    folder.append_trajectories(3, consumed(3, 8, task, advantage=-1.0))
    folder.append_trajectories(4, iter(consumed(4, 9)))
    first, second, third, _ = lines(folder.path / "trajectories.jsonl")
    weird = {"1": "<class 'object'>", "nan": None}
    expected = {
        "step": 3, "group": 8, "sample": 0, "attempt": 0,
        "task": {"prompt": "3 + 4?", "answer": 7, "weird": weird, "t": [1, 2]},
        "completion": "seven", "reward": 1.0, "finish_reason": "stop", "temperature": 1.0,
        "token_ids": [1, 2, 3, 5], "sampled": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -1.25],
        "versions": [-1, -1, 4, 5],
    }  # fmt: skip
    assert first | expected == first
    assert "advantage" not in first
    assert (second["sample"], second["reward"], second["advantage"]) == (3, 0.0, -1.0)
    assert (third["step"], third["group"]) == (4, 9)


def test_offenders_are_saved_with_the_reason(folder: RunFolder) -> None:
    bad = trajectory(5, 1, logprob=math.nan)
    path = folder.save_offenders(6, [bad, trajectory(5, 2)], "the loss is not finite")
    assert path == folder.path / "failures" / "step-6.jsonl"
    first, second = lines(path)
    assert first["reason"] == second["reason"] == "the loss is not finite"
    assert first["id"] == [5, 1, 0]
    assert first["logprobs"] == [0.0, 0.0, None, -1.25]
    restored = {key: value for key, value in second.items() if key not in ("step", "reason")}
    assert Trajectory.from_dict(restored) == trajectory(5, 2)
    assert lines(folder.save_offenders(7, [], "why")) == [{"step": 7, "reason": "why"}]


# Resume


def test_rewind_forgets_later_steps(folder: RunFolder) -> None:
    for step in (1, 2, 3, 4):
        folder.append_metrics({"step": step, "reward_mean": step, "tokens_generated_total": 100 * step})
        folder.append_trajectories(step, consumed(step, step))
    folder.close()
    with RunFolder.open(folder.path) as again:
        assert again.rewind(2) == {"metrics.jsonl": 2, "trajectories.jsonl": 2}
        assert [line["step"] for line in lines(again.path / "metrics.jsonl")] == [1, 2]
        assert [line["step"] for line in lines(again.path / "trajectories.jsonl")] == [1, 1, 2, 2]
        again.append_metrics({"step": 3, "reward_mean": 30, "tokens_generated_total": 350})
        assert [line["step"] for line in lines(again.path / "metrics.jsonl")] == [1, 2, 3]
        assert scalars(again)["reward_mean"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
        assert again.rewind(9) == {"metrics.jsonl": 3, "trajectories.jsonl": 2}
        assert again.rewind(0) == {"metrics.jsonl": 0, "trajectories.jsonl": 0}
        assert lines(again.path / "metrics.jsonl") == lines(again.path / "trajectories.jsonl") == []
        again.append_metrics({"step": 1, "reward_mean": 10})
        assert scalars(again)["reward_mean"] == [(1, 10.0)]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "rew', b'{"step": 2}', b"\0" * 40, b"\xff\xfe\n", b"[]\n", b"{}\n"]
)
def test_a_torn_last_line_is_dropped(
    folder: RunFolder, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder.append_metrics({"step": 1, "tokens_generated_total": 10})
    with (folder.path / "metrics.jsonl").open("ab") as stream:
        stream.write(torn)
    folder.rewind(2)
    assert "a line is not readable" in caplog.text
    folder.append_metrics({"step": 2})
    assert [line["step"] for line in lines(folder.path / "metrics.jsonl")] == [1, 2]


def test_rewind_of_a_run_without_logs(folder: RunFolder) -> None:
    folder.rewind(0)
    assert not (folder.path / "metrics.jsonl").exists()


# Checkpoints


def test_only_complete_checkpoints_count(folder: RunFolder) -> None:
    assert folder.checkpoints() == []
    assert folder.latest_checkpoint() is None
    for step in (10, 2, 9):
        with atomic_folder(folder.checkpoint_path(step)) as temporary:
            (temporary / "weights").touch()
            assert step not in folder.checkpoints()
    checkpoints = folder.path / "checkpoints"
    leftovers = [checkpoints / ".tmp-step-11-abc", folder.path / ".tmp-final-abc"]
    for leftover in leftovers:
        leftover.mkdir()
    (checkpoints / "step-12").touch()
    (checkpoints / "step-012").mkdir()
    (checkpoints / "step-13.bak").mkdir()
    assert folder.checkpoints() == [2, 9, 10]
    assert folder.latest_checkpoint() == 10
    assert folder.checkpoint_path(9) == checkpoints / "step-9"
    assert folder.final_path == folder.path / "final"
    folder.close()
    RunFolder.open(folder.path, read_only=True).close()
    assert all(leftover.exists() for leftover in leftovers), "a reader removes nothing"
    RunFolder.open(folder.path).close()
    assert not any(leftover.exists() for leftover in leftovers)


def test_prune_keeps_the_newest(folder: RunFolder) -> None:
    for step in (1, 5, 10):
        folder.checkpoint_path(step).mkdir()
    assert folder.prune(3) == []
    assert folder.prune(2) == [1]
    assert folder.checkpoints() == [5, 10]
    assert folder.prune(1) == [5]
    assert [entry.name for entry in (folder.path / "checkpoints").iterdir()] == ["step-10"]
    with pytest.raises(ValueError, match="at least 1"):
        folder.prune(0)


def test_a_line_stays_one_line_whatever_it_holds(tmp_path: Path, config: Config) -> None:
    text = "".join(map(chr, range(0x3000))) + "\ud800"
    with RunFolder.create(tmp_path / "run", config) as folder:
        folder.append_metrics({"step": 1, "text": text})
    raw = (tmp_path / "run" / "metrics.jsonl").read_bytes().decode()
    assert len(raw.splitlines()) == 1
    assert json.loads(raw)["text"][:0x3000] == text[:0x3000]


def test_the_number_of_generated_tokens_survives_everything_but_the_disk(folder: RunFolder) -> None:
    assert folder.noted_generated() == 0
    for tokens in (5, 123_456, 123_460):
        folder.note_generated(tokens)
    folder.append_metrics({"step": 1})
    folder.close()
    with RunFolder.open(folder.path) as again:
        again.rewind(0)
        assert again.noted_generated() == 123_460
    (folder.path / "tokens_generated").write_text("what?")
    with RunFolder.open(folder.path, read_only=True) as again:
        assert again.noted_generated() == 0


def test_a_path_below_a_file_is_refused(tmp_path: Path, config: Config) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file; pick another"):
        RunFolder.create(tmp_path / "file" / "run", config)
