"""Ctrl-C and SIGTERM in its own process: with a checkpoint or at once, resumable, nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import command

DEADLINE_S = 60


class Training:
    """`headrace train` in a process of its own, on a terminal or not; `output` grows while it runs."""

    def __init__(self, folder: Path, environ: dict[str, str], *arguments: object, terminal: bool) -> None:
        self.output = b""
        self._source, target = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            command(["train", *arguments]),
            cwd=folder,
            env={**environ, "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=target,
        )
        os.close(target)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._source, 4096):
                self.output += chunk
        except OSError:  # how a terminal says that its other end is closed
            pass

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert self.process.poll() is None, self.output.decode()
            assert time.monotonic() < deadline, self.output.decode()
            time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        os.close(self._source)
        return code


def steps_logged(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def start(config: Path, environ: dict[str, str]) -> Callable[..., Training]:
    (config.parent / "delay.txt").write_text("0.1")
    config.write_text(config.read_text().replace("tasks = 4", "tasks = 0").replace("steps = 3", "steps = 6"))

    def run(*arguments: object, terminal: bool = False) -> Training:
        return Training(config.parent, environ, *arguments, terminal=terminal)

    return run


def resume_to_the_end(folder: Path, call: Callable[..., Any]) -> str:
    (folder / "delay.txt").write_text("0")
    called = call("train", "--resume", folder / "run")
    assert called.code == 0, called.err
    assert steps_logged(folder / "run") == [1, 2, 3, 4, 5, 6]
    assert (folder / "run" / "final" / "model.safetensors").exists()
    return str(called.out)


def test_once_finishes_the_unit_and_checkpoints(
    start: Callable[..., Training], config: Path, call: Callable[..., Any]
) -> None:
    folder = config.parent
    training = start(config, "--run-dir", "run")
    training.until(lambda: len(steps_logged(folder / "run")) >= 1)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 128 + signal.SIGINT
    output = training.output.decode()
    step = steps_logged(folder / "run")[-1]
    assert "stopping after this unit" in output
    assert f"stopped after step {step} of 6; a checkpoint is written" in output
    assert "resume with: headrace train --resume run\n" in output
    assert "Traceback" not in output
    assert (folder / "run" / "checkpoints" / f"step-{step}").is_dir()
    told = call("state", folder / "run").out
    assert told.startswith("run: stopped\n")
    assert "interrupted unit" not in told
    # What a unit draws before it is interrupted is counted and not in the journal: `state` says what a resume will.
    count = folder / "run" / "tokens_generated"
    count.write_text(f"{int(count.read_text()) + 7:020d}\n")
    assert "7 tokens of the interrupted unit are lost" in call("state", folder / "run").out
    resumed = resume_to_the_end(folder, call)
    assert "; 7 tokens that were sampled after the journal's last event are lost" in resumed
    assert "interrupted unit" not in call("state", folder / "run").out
    assert "run: complete" in call("state", folder / "run").out


def test_sigterm_before_the_first_step(
    start: Callable[..., Training], config: Path, call: Callable[..., Any]
) -> None:
    folder = config.parent
    training = start(config, "--run-dir", "run")
    training.until((folder / "run").exists)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 128 + signal.SIGTERM
    assert "stopped after step 0 of 6" in training.output.decode()
    resume_to_the_end(folder, call)


def test_twice_stops_now_and_restores_the_terminal(
    start: Callable[..., Training], config: Path, call: Callable[..., Any]
) -> None:
    folder = config.parent
    training = start(config, "--run-dir", "run", terminal=True)
    training.until(lambda: len(steps_logged(folder / "run")) >= 1)
    (folder / "delay.txt").write_text("60")
    training.until((folder / "asleep").exists)
    seen = len(training.output)
    training.until(lambda: training.output[seen:].count(b"waiting on") >= 4)
    workers = psutil.Process(training.process.pid).children(recursive=True)
    assert workers
    training.process.send_signal(signal.SIGINT)
    training.until(lambda: b"once more stops now" in training.output)
    started = time.monotonic()
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 128 + signal.SIGINT
    assert time.monotonic() - started < 5
    assert b"stopped at once" in training.output
    assert b"Traceback" not in training.output
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    assert hide in training.output
    assert training.output.rindex(show) > training.output.rindex(hide)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    assert call("state", folder / "run").out.startswith("run: killed\n")
    resume_to_the_end(folder, call)
