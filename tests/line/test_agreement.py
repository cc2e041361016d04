"""Rollouts of another policy than the trained one: measured in each step, and the run stops when they are too far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from line_cases import check_books, environment_file, lines_of, settings
from torch import Tensor

from headrace import Observer
from headrace.config import Config
from headrace.engine.forward import Forward
from headrace.errors import RunError
from headrace.line.evaluate import evaluate
from headrace.line.run import Run
from headrace.line.setup import Workplace, prepare
from headrace.runs.agreement import JUDGED_TOKENS, PATIENCE, Memory, quantised_problem, remember
from headrace.runs.folder import RunFolder
from headrace.trainer import divergence_of

VARIED = "sum(i * ord(c) for i, c in enumerate(completion)) % 1009 / 1009"
"""A reward that no two completions share."""


class Sharpened:
    """A forward whose logits are those of another policy: the generator's own, times a factor."""

    def __init__(self, forward: Forward, factor: float) -> None:
        self.forward, self.factor = forward, factor

    def __call__(self, *arguments: Any) -> Tensor:
        return self.forward(*arguments) * self.factor

    def repack(self) -> None:
        self.forward.repack()


def sharpen(workplace: Workplace, factor: float) -> None:
    engine = workplace.engine
    engine.forward = engine.runner.forward = Sharpened(engine.forward, factor)


def quantised(folder: Path, reward: str = VARIED, **line: Any) -> Config:
    """int8 rollouts, strictly on-policy, of less than 200 tokens a step."""
    tasks = """
    def tasks(self, split):
        return [{"prompt": f"task {i}"} for i in range(100)]

    def reward(self, task, completion):
        return """
    return settings(
        environment={"name": environment_file(folder, tasks + reward)},
        algorithm={"ratio": "proximal", "group_size": 8},
        sampling={"max_tokens": 12},
        engine={"weight_format": "int8", "max_sequences": 16},
        line={"steps": 8, "max_staleness": 0, "checkpoint_every": 0} | line,
    )


@contextmanager
def production(config: Config, run_dir: Path, factor: float) -> Iterator[Run]:
    resumed = run_dir.exists()
    folder = RunFolder.open(run_dir) if resumed else RunFolder.create(run_dir, config)
    with folder, prepare(folder.config) as workplace:
        sharpen(workplace, factor)
        yield Run(workplace, folder, Observer(), lambda: False)


@pytest.mark.kernels
def test_rollouts_that_no_longer_resemble_the_policy_stop_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = quantised(tmp_path)
    with (
        pytest.raises(RunError, match=r"no longer resemble the policy.*mismatch_ess_limit = 0\.7") as caught,
        production(config, run_dir, factor=2.0) as line,
    ):
        line.run(resume=False)
    assert "\n" not in str(caught.value)
    steps = lines_of(run_dir, "metrics.jsonl")
    assert 0 < len(steps) < 8
    for metrics in steps:
        assert metrics["logprob_diff_tokens"] == metrics["tokens_trained"], "none twice"
        assert metrics["logprob_diff_mean"] > config.line.logprob_diff_limit, (
            "that limit is not for another policy"
        )
        assert 0 < metrics["mismatch_ess"] < 0.7
        assert metrics["mismatch_kl"] > 0.05
        assert metrics["mismatch_ess"] == pytest.approx(metrics["ess"]), (
            "on-policy there is no drift beside it"
        )
    # What was reached is saved, and goes on once the user accepts it.
    with RunFolder.open(run_dir, read_only=True) as folder:
        assert folder.latest_checkpoint() == len(steps)
    settings_file = run_dir / "config.toml"
    text = settings_file.read_text()
    settings_file.write_text(text.replace("mismatch_ess_limit = 0.7", "mismatch_ess_limit = 0.001"))
    with production(config, run_dir, factor=2.0) as line:
        assert len(line.run(resume=True).metrics) == 8
    check_books(run_dir, config)


@pytest.mark.kernels
def test_a_small_mismatch_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    with production(quantised(tmp_path), tmp_path / "run", factor=1.15) as line:
        line.run(resume=False)
    for metrics in lines_of(tmp_path / "run", "metrics.jsonl"):
        assert 0.85 < metrics["mismatch_ess"] < 0.999


@pytest.mark.kernels
def test_steps_without_any_gradient_are_compared_too(tmp_path: Path) -> None:
    with production(quantised(tmp_path, reward="1.0", steps=2), tmp_path / "run", factor=1.15) as line:
        line.run(resume=False)
    for metrics in lines_of(tmp_path / "run", "metrics.jsonl"):
        assert metrics["grad_norm"] == 0
        assert metrics["logprob_diff_tokens"] > 100
        assert 0.85 < metrics["mismatch_ess"] < 0.999


def test_in_the_models_own_format_any_disagreement_stops_the_run(tmp_path: Path) -> None:
    config = settings(line={"mismatch_ess_limit": 0.001})
    with (
        pytest.raises(RunError, match="trainer and generator disagree by"),
        production(config, tmp_path / "run", factor=1.15) as line,
    ):
        line.run(resume=False)


class Judge:
    """Judges one step after another, as a run does."""

    def __init__(self, config: Config) -> None:
        self.limit = config.line.mismatch_ess_limit
        self.memory = Memory()

    def step(self, tokens: int, log_ratio: float, outliers: int = 0) -> str | None:
        """A step of `tokens` tokens whose ratios are exp(±log_ratio), `outliers` of them e⁶."""
        difference = torch.full((tokens,), log_ratio, dtype=torch.float64)
        difference[::2] *= -1
        difference[:outliers] = 6.0
        step = divergence_of(difference - 10, torch.full((tokens,), -10.0, dtype=torch.float64))
        problem = quantised_problem(self.memory, step, self.limit)
        self.memory = Memory.from_dict(
            json.loads(json.dumps(remember(self.memory, step, self.limit).to_dict()))
        )
        return problem


def test_small_steps_are_judged_together(tmp_path: Path) -> None:
    judge = Judge(quantised(tmp_path))
    step = JUDGED_TOKENS // 8
    assert [judge.step(step, 1.5) for _ in range(8 * PATIENCE - 1)] == [None] * (8 * PATIENCE - 1)
    problem = judge.step(step, 1.5)
    assert problem is not None
    assert f"over {JUDGED_TOKENS} tokens" in problem


def test_one_extreme_token_stops_no_run(tmp_path: Path) -> None:
    judge = Judge(quantised(tmp_path))
    for _ in range(3):
        assert judge.step(JUDGED_TOKENS, 0.1, outliers=1) is None
        assert judge.step(JUDGED_TOKENS, 0.1) is None
    assert judge.step(JUDGED_TOKENS, 0.1, outliers=1) is None
    assert judge.step(JUDGED_TOKENS, 0.1, outliers=1) is not None


@pytest.mark.kernels
def test_the_held_out_reward_is_that_of_the_weights_that_are_saved(tmp_path: Path) -> None:
    config = settings(eval={"tasks": 6}, algorithm={"ratio": "proximal"}, engine={"weight_format": "int8"})
    plain = settings(eval={"tasks": 6})
    with prepare(plain) as workplace:
        expected = [task.completion for task in evaluate(workplace, 0).tasks]
    with prepare(config) as workplace:
        sharpen(workplace, -1.0)  # the generator answers otherwise
        assert [task.completion for task in evaluate(workplace, 0).tasks] == expected
    with prepare(plain) as workplace:
        sharpen(workplace, -1.0)
        assert [task.completion for task in evaluate(workplace, 0).tasks] != expected
