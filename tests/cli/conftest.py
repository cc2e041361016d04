"""The command line, called in this process where that will do and in one of its own where it matters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import command

from headrace import cli

ENVIRONMENT = '''
import time
from pathlib import Path

DELAY = Path(__file__).with_name("delay.txt")


class Even:
    """Rewards an even number of characters, `delay.txt` seconds later."""

    def tasks(self, split):
        return [{"prompt": f"{split} {i}"} for i in range(9)]

    def reward(self, task, completion):
        delay = float(DELAY.read_text()) if DELAY.exists() else 0.0
        if delay > 1:
            DELAY.with_name("asleep").touch()
        time.sleep(delay)
        return float(len(completion) % 2 == 0)


class RaisesInTasks(Even):
    def tasks(self, split):
        raise KeyError("no tasks today")


class RaisesInReward(Even):
    def reward(self, task, completion):
        raise ValueError("two\\nlines")


class ReturnsText(Even):
    def reward(self, task, completion):
        return "one"


class LongPrompt(Even):
    def tasks(self, split):
        return [{"prompt": "x" * 2000}]
'''

CONFIG = """
[model]
name = "tiny-random"
[environment]
name = "tasks.py:Even"
[sampling]
max_tokens = 8
[algorithm]
group_size = 4
[trainer]
learning_rate = 1e-3
[line]
groups_per_step = 2
steps = 3
checkpoint_every = 2
threads = 1
[eval]
tasks = 4
"""


@dataclass(frozen=True)
class Called:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with an empty model cache, one for all tests of the command line."""
    variables = {
        **os.environ,
        "HEADRACE_CACHE": str(tmp_path_factory.mktemp("cache")),
        "OMP_NUM_THREADS": "1",
    }
    return {name: value for name, value in variables.items() if name not in ("COLUMNS", "FORCE_COLOR")}


def write_project(folder: Path) -> Path:
    """A folder with settings and an environment; returns the settings file."""
    (folder / "tasks.py").write_text(ENVIRONMENT)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder / "tiny.toml"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_project(tmp_path)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    environ: dict[str, str],
    tmp_path: Path,
) -> Callable[..., Called]:
    """`headrace ARGUMENTS` in this process, in an empty working folder of its own."""
    monkeypatch.setenv("HEADRACE_CACHE", environ["HEADRACE_CACHE"])
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capfd.readouterr()
        return Called(exit_.value.code or 0, out, err)  # type: ignore[arg-type]

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> tuple[Path, Called]:
    """A finished run's folder, and what training it printed; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run(
        command(["train", write_project(folder)]),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return folder / "runs" / "tiny-001", Called(done.returncode, done.stdout, done.stderr)
