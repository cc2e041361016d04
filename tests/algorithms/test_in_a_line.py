"""Algorithms in a running line: each one trains and is replayed; what is wrong with a user's class is said clearly."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_cases import environment_file, lines_of, settings
from test_own import ADVANTAGES, LOSS, example, write

from headrace import Line
from headrace.algorithms import BUILT_IN
from headrace.errors import ConfigError, NonFiniteError, RunError
from headrace.line.replay import replay

WORLD = """
    def tasks(self, split):
        return [{"prompt": f"task {i}"} for i in range(50)]

    def reward(self, task, completion):
        return sum(map(ord, completion)) % 3 / 2
"""


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_algorithm_runs_and_is_replayed(name: str, tmp_path: Path) -> None:
    world = {"name": environment_file(tmp_path, WORLD)}
    config = settings(environment=world, algorithm={"name": name}, line={"steps": 3})
    Line.from_config(config, tmp_path / "run").run()
    metrics = lines_of(tmp_path / "run", "metrics.jsonl")
    assert len(metrics) == 3
    assert any(step["tokens_trained"] for step in metrics)
    assert all(step["clamped_ratio"] == 0 for step in metrics)
    assert all(step.equal for step in replay(tmp_path / "run"))


def test_advantages_of_the_batch_wait_for_its_last_group(tmp_path: Path) -> None:
    """The first group of a step is rewarded long before the second, with nothing to decode meanwhile."""
    slow = """
    def tasks(self, split):
        return [{"prompt": f"task {i}", "wait": 0.4 * (i % 2)} for i in range(50)]

    def reward(self, task, completion):
        time.sleep(task["wait"])
        return sum(map(ord, completion)) % 3 / 2
"""
    world = {"name": environment_file(tmp_path, slow), "workers": 2}
    line = {"steps": 2, "max_staleness": 0}
    config = settings(environment=world, algorithm={"name": "reinforce"}, line=line)
    Line.from_config(config, tmp_path / "run").run()
    assert all(step.equal for step in replay(tmp_path / "run"))
    waited = lines_of(tmp_path / "run", "metrics.jsonl")
    assert all(step["time_idle_s"] > 0.2 for step in waited)


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    (tmp_path / "gentle.py").write_text(example())
    algorithm = {"name": f"{tmp_path / 'gentle.py'}:Gentle", "options": {"push": 0.3}}
    Line.from_config(settings(algorithm=algorithm, line={"steps": 2}), tmp_path / "run").run()
    assert len(lines_of(tmp_path / "run", "metrics.jsonl")) == 2


def test_what_is_not_finite_is_saved(tmp_path: Path) -> None:
    path = write(
        tmp_path, ADVANTAGES + "    def loss(self, tokens):\n        return tokens.logp * float('nan')\n"
    )
    config = settings(algorithm={"name": f"{path}:Mine"})
    with pytest.raises(NonFiniteError, match="a loss of Mine is not finite"):
        Line.from_config(config, tmp_path / "run").run()
    assert list((tmp_path / "run" / "failures").iterdir())


def test_a_wrong_shape_ends_the_run_with_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, ADVANTAGES + "    def loss(self, tokens):\n        return tokens.logp.sum()\n")
    with pytest.raises(RunError, match="algorithm Mine, loss: a loss must have one value per token"):
        Line.from_config(settings(algorithm={"name": f"{path}:Mine"}), tmp_path / "run").run()


def test_a_class_that_cannot_be_loaded_is_refused_before_any_work(tmp_path: Path) -> None:
    path = write(tmp_path, "    def __init__(self, push): pass\n" + ADVANTAGES + LOSS)
    with pytest.raises(ConfigError, match="needs the option 'push'"):
        Line.from_config(settings(algorithm={"name": f"{path}:Mine"}), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()
