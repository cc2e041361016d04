"""`import headrace`: quick, complete, and what the examples use."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import islice
from pathlib import Path

import pytest

import headrace
from headrace.config import Config
from headrace.environments import load_environment

ROOT = Path(__file__).resolve().parents[2]


def test_importing_loads_no_torch() -> None:
    program = (
        "import sys, headrace; headrace.Sampling, headrace.Config, headrace.Trajectory, headrace.UserError; "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_resolves() -> None:
    assert set(headrace._HOMES) | {"__version__"} == set(headrace.__all__)
    for name in headrace.__all__:
        assert getattr(headrace, name) is getattr(headrace, name)
    assert set(headrace.__all__) <= set(dir(headrace))
    with pytest.raises(AttributeError, match="Enginee"):
        headrace.Enginee  # noqa: B018


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert headrace.__version__ == project["version"]


def test_examples_load_and_their_environments_answer() -> None:
    for path in sorted((ROOT / "examples").glob("*.toml")):
        config = Config.load(path)
        environment = load_environment(config.environment.name, config.environment.options)
        for split in ("train", "test"):
            tasks = list(islice(environment.tasks(split), 3))
            assert len(tasks) == 3
            if hasattr(environment, "step"):  # conversations are tried where they run
                continue
            assert all(task["prompt"] for task in tasks)
            assert environment.reward(tasks[0], "") == 0.0
            assert environment.reward(tasks[0], "no idea") < 0.2
            if "answer" in tasks[0]:
                assert environment.reward(tasks[0], str(tasks[0]["answer"])) == 1.0


def test_the_addition_example() -> None:
    config = Config.load(ROOT / "examples" / "addition.toml")
    assert (
        config.to_dict()
        == Config.from_dict(
            {
                "model": {"name": "smollm2-135m", "dtype": "float32"},
                "environment": {"name": "arithmetic"},
                "sampling": {"temperature": 1.0, "max_tokens": 24},
                "algorithm": {"name": "grpo", "group_size": 8},
                "trainer": {"learning_rate": 1e-5},
                "line": {"groups_per_step": 8, "steps": 15, "max_staleness": 1, "seed": 0},
            }
        ).to_dict()
    )
