"""The row of algorithms: the worst one counts."""

import pytest

from benchmarks import algorithms, runs
from headrace.config import Config
from headrace.presets import PRESETS


def test_the_worst_algorithm_counts():
    row = algorithms.row({"grpo": [0.9, 1.0, 0.95], "gspo": [0.7, 0.8, 0.9]})
    assert row.headrace == pytest.approx(0.8)
    assert "worst of 2 algorithms (gspo)" in row.what
    assert row.met is False
    assert row.details["means"] == pytest.approx({"grpo": 0.95, "gspo": 0.8})
    assert algorithms.row({"grpo": [0.9, 1.0, 0.95]}).met


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_runs_the_example(name):
    config = Config.load(runs.ADDITION, (f"algorithm.name={name}",))
    assert config.line.steps == algorithms.STEPS
    assert config.algorithm.name == name
