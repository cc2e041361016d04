"""Whatever is wrong with the input is one line on standard error, exit code 2, and nothing is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = {
    "unknown key": (["--set", "trainer.learning_rte=1e-5"], "did you mean 'trainer.learning_rate'"),
    "unknown section": (["--set", "trainr.eps=1e-5"], "did you mean 'trainer'"),
    "unknown environment": (["--set", "environment.name=arithmetics"], "did you mean 'arithmetic'"),
    "unknown environment option": (
        ["--set", "environment.name=arithmetic", "--set", "environment.options.operator=+"],
        "operators",
    ),
    "impossible environment option": (
        ["--set", "environment.name=arithmetic", "--set", "environment.options.minimum=100"],
        "minimum",
    ),
    "wrong type": (["--set", "line.steps=many"], "line.steps = 'many'"),
    "no setting": (["--set", "line.steps"], "section.key=value"),
    "missing model file": (["--set", "model.name=nowhere.gguf"], "no such file or folder"),
    "missing model": (["--set", "model.name=tiny-rando"], "did you mean 'tiny-random'"),
    "unreadable GGUF": (["--set", "model.name=broken.gguf"], "broken.gguf"),
    "environment without the class": (["--set", "environment.name=tasks.py:Odd"], "no class 'Odd'"),
    "environment raises in tasks": (["--set", "environment.name=tasks.py:RaisesInTasks"], "no tasks today"),
    "environment raises in reward": (["--set", "environment.name=tasks.py:RaisesInReward"], "ValueError"),
    "reward is no number": (["--set", "environment.name=tasks.py:ReturnsText"], "'one'"),
    "prompt longer than the context": (["--set", "environment.name=tasks.py:LongPrompt"], "context of 1024"),
    "group of one": (["--set", "algorithm.group_size=1"], "at least 2"),
    "cut distribution": (["--set", "sampling.top_p=0.9"], "top_p = 1"),
    "quantised rollouts in double precision": (
        ["--set", "engine.weight_format=int8", "--set", "model.dtype=float64"],
        'engine.weight_format = "int8" needs model.dtype = "float32", not "float64"',
    ),
    "quantised rollouts on another device": (
        ["--set", "engine.weight_format=int8", "--set", "model.device=cuda"],
        'engine.weight_format = "int8" needs model.device = "cpu", not "cuda"',
    ),
    "quantised rollouts that the loss does not correct for": (
        ["--set", "engine.weight_format=int8"],
        'needs algorithm.ratio = "proximal"',
    ),
    "quantised rollouts without packed weights": (
        ["--set", "engine.weight_format=int8", "--set", "engine.prepack=false"],
        "leave prepack = true",
    ),
    "limit that no rollouts can meet": (["--set", "line.mismatch_ess_limit=1.0"], "less than 1"),
    "too little KV memory": (
        ["--set", "engine.kv_memory_mb=1", "--set", "model.dtype=float64"],
        "too little memory for KV",
    ),
    "more KV memory than there is": (["--set", "engine.kv_memory_mb=1000000000"], "too little memory for KV"),
    "context beyond the model": (["--set", "engine.context_length=4096"], "the model's 1024"),
    "run folder exists": (["--run-dir", "taken"], "taken exists already"),
}


@pytest.fixture
def project(config: Path) -> Path:
    (config.parent / "broken.gguf").write_bytes(b"this is no GGUF")
    (config.parent / "taken").mkdir()
    return config


def refused(called: Any, says: str) -> None:
    assert called.code == 2, called
    assert called.err.count("\n") == 1, called.err
    assert called.err.startswith("error: ")
    assert says in called.err


@pytest.mark.parametrize("case", CASES)
def test_train_refuses_before_any_work(case: str, project: Path, call: Callable[..., Any]) -> None:
    arguments, says = CASES[case]
    before = sorted(project.parent.iterdir())
    refused(call("train", project, *arguments), says)
    assert sorted(project.parent.iterdir()) == before
    assert not any((project.parent / "taken").iterdir())


@pytest.mark.parametrize(
    "case",
    [
        "environment raises in reward",
        "missing model",
        "prompt longer than the context",
        "context beyond the model",
        "run folder exists",
    ],
)
def test_a_dry_run_refuses_it_too(case: str, project: Path, call: Callable[..., Any]) -> None:
    arguments, says = CASES[case]
    refused(call("train", project, "--dry-run", *arguments), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train"], "give a CONFIG.toml"),
        (["train", "missing.toml"], "missing.toml: no such file"),
        (["train", "tasks.py"], "not valid TOML"),
        (["train", "tiny.toml", "--resume", "somewhere"], "give it alone"),
        (["train", "--resume", "taken"], "not a run folder"),
        (["eval", "missing.toml"], "missing.toml: no such file"),
        (["eval", "taken"], "not a run folder"),
        (["eval", "tiny.toml", "--checkpoint", "2"], "--checkpoint needs a run folder"),
        (["generate", "tiny-rando", "hello"], "did you mean 'tiny-random'"),
        (["generate", "tiny-random", "hello", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["pull", "broken.gguf"], "broken.gguf"),
    ],
)
def test_other_wrong_calls(arguments: list[str], says: str, project: Path, call: Callable[..., Any]) -> None:
    refused(call(*arguments), says)
    assert not (project.parent / "runs").exists()


def test_a_usage_error_is_exit_code_2(call: Callable[..., Any]) -> None:
    called = call("train", "--stepz")
    assert called.code == 2
    assert "--stepz" in called.err


def test_an_unexpected_exception_keeps_its_traceback(config: Path, environ: dict[str, str]) -> None:
    program = "from headrace import Config, cli; Config.load = lambda *a: 1 / 0; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(config)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_help_wrong_settings_and_looking_at_runs_load_no_torch(config: Path, environ: dict[str, str]) -> None:
    program = """
import sys
from headrace import cli
for arguments in (
    ["--help"],
    ["train", "--help"],
    ["train", sys.argv[1], "--set", "line.steps=-1"],
    ["runs", "list", "."],
    ["runs", "trajectories", "."],
    ["state", "."],
):
    sys.argv[1:] = arguments
    try:
        cli.main()
    except SystemExit:
        pass
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("sys.argv[1],", f"{str(config)!r},")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "line.steps = -1" in done.stderr
