"""Each command, on the tiny model."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config

Call = Callable[..., Any]


@pytest.mark.parametrize("command", ["train", "eval", "generate", "pull", "doctor"])
def test_help_shows_examples(command: str, call: Call) -> None:
    called = call(command, "--help")
    assert called.code == 0
    assert f"headrace {command}" in called.out[called.out.index("Examples") :]


def test_help_lists_every_command_and_version_is_printed(call: Call) -> None:
    called = call("--help")
    assert all(command in called.out for command in ("train", "eval", "generate", "pull", "doctor"))
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", call("--version").out)


def test_train_says_what_came_of_it(trained: tuple[Path, Any]) -> None:
    run_dir, called = trained
    assert called.code == 0, called.err
    assert called.err == ""
    lines = called.out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    assert "held-out reward before training: " in called.out
    summary = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines[-6:])
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    before, after = (
        json.loads((run_dir / f"evaluation-{name}.json").read_text())["reward"]
        for name in ("before", "after")
    )
    assert summary["held-out before"] == f"{before:.3f} on 4 tasks"
    assert summary["held-out after"] == f"{after:.3f} on 4 tasks"
    mean = sum(m["reward_mean"] for m in metrics) / 3
    assert summary["reward"] == f"{mean:.3f}, mean of the last 3 steps"
    assert summary["training time"].endswith("for 3 steps")
    assert summary["run folder"] == "runs/tiny-001"
    assert summary["model"] == "runs/tiny-001/final"
    assert (run_dir / "final" / "model.safetensors").exists()


def test_resuming_a_complete_run_says_so(trained: tuple[Path, Any], call: Call) -> None:
    run_dir, _ = trained
    before = (run_dir / "metrics.jsonl").read_bytes()
    called = call("train", "--resume", run_dir)
    assert called.code == 0
    assert "is complete" in called.out
    assert str(run_dir / "final") in called.out
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_the_folder_of_a_run_is_not_used_twice(trained: tuple[Path, Any], config: Path, call: Call) -> None:
    called = call("train", config, "--run-dir", trained[0])
    assert called.code == 2
    assert "exists already" in called.err


def test_eval_of_a_run_is_what_the_run_measured(trained: tuple[Path, Any], call: Call) -> None:
    run_dir, _ = trained
    called = call("eval", run_dir)
    assert called.code == 0, called.err
    after = json.loads((run_dir / "evaluation-after.json").read_text())
    assert f"held-out reward {after['reward']:.3f} on 4 tasks" in called.out
    assert "4 of 4 tasks" in called.out
    assert all(task["prompt"] in called.out for task in after["tasks"])


def test_eval_of_a_checkpoint(trained: tuple[Path, Any], call: Call) -> None:
    called = call("eval", trained[0], "--checkpoint", 2)
    assert called.code == 0, called.err
    assert "held-out reward" in called.out
    called = call("eval", trained[0], "--checkpoint", 1)
    assert called.code == 2
    assert "no checkpoint of step 1; choose one of its checkpoints with --checkpoint: 2, 3" in called.err


def test_eval_of_settings(trained: tuple[Path, Any], config: Path, call: Call) -> None:
    called = call("eval", config)
    before = json.loads((trained[0] / "evaluation-before.json").read_text())["reward"]
    assert called.code == 0, called.err
    assert f"held-out reward {before:.3f} on 4 tasks" in called.out
    config.write_text(config.read_text().replace("tasks = 4", "tasks = 0"))
    called = call("eval", config)
    assert called.code == 2
    assert "eval.tasks = 0" in called.err


def test_generate_streams_the_same_text_for_the_same_seed(trained: tuple[Path, Any], call: Call) -> None:
    arguments = ("generate", trained[0] / "final", "hello", "--max-tokens", 12)
    first = call(*arguments)
    assert first.code == 0, first.err
    assert first.err == ""
    assert len(first.out) > 1
    assert call(*arguments).out == first.out
    assert call(*arguments, "--seed", 1).out != first.out
    assert call(*arguments, "--raw").out != first.out


def test_generate_greedily_is_what_the_engine_generates(trained: tuple[Path, Any], call: Call) -> None:
    import headrace

    called = call("generate", trained[0] / "final", "hello", "--max-tokens", 12, "--temperature", 0)
    engine = headrace.Engine.load(str(trained[0] / "final"), max_sequences=1)
    messages = [{"role": "user", "content": "hello"}]
    outputs = engine.generate([messages], headrace.Sampling(temperature=0, max_tokens=12))
    assert called.out == outputs[0].samples[0].text + "\n"


def test_pull_prints_the_folder(call: Call) -> None:
    called = call("pull", "tiny-random")
    assert called.code == 0
    assert (Path(called.out.strip()) / "config.json").exists()


def test_doctor_reports(call: Call) -> None:
    called = call("doctor")
    assert called.code == 0
    for name in ("python", "torch", "threads", "memory", "cache folder"):
        assert re.search(rf"^(ok|!!)\s+{name}\s", called.out, re.MULTILINE), name


def test_dry_run_shows_settings_memory_and_a_task_and_makes_nothing(config: Path, call: Call) -> None:
    called = call("train", config, "--dry-run", "--set", "trainer.learning_rate=0.5")
    assert called.code == 0, called.err
    settings, rest = called.out.split("memory, roughly")
    resolved = tomllib.loads(settings[settings.index("[model]") :])
    assert Config.from_dict(resolved) == Config.load(config, ["trainer.learning_rate=0.5"])
    for name in ("weights", "optimizer moments", "total", "available"):
        assert re.search(rf"^\s+{name}\s+[\d.,]+ MB$", rest, re.MULTILINE), name
    assert "train " in rest[rest.index("first task") :]
    assert not (config.parent / "runs").exists()
