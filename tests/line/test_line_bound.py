"""The bound on staleness, exactly-once and the books, whatever finishes first and wherever the run dies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from line_cases import ChosenPool, KillAt, Killed, check_books, environment_file, settings

from headrace import Line, Observer
from headrace.algorithms import load_algorithm
from headrace.engine import Engine
from headrace.line.run import Run
from headrace.line.setup import Workplace
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.runs.folder import RunFolder
from headrace.schedule import DecodeCost

BOUNDS = [0, 1, 2, 4]


class AlwaysAhead(DecodeCost):
    """A cell on which running ahead always pays, whatever the clock says."""

    @property
    def efficient_sequences(self) -> float:
        return float("inf")


@pytest.mark.parametrize("bound", BOUNDS)
@hypothesis_settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), groups=st.integers(1, 3))
def test_an_adversary_who_chooses_every_completion_time(
    bound: int, data: st.DataObject, groups: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = settings(
        sampling={"max_tokens": 2},
        line={"max_staleness": bound, "groups_per_step": groups, "steps": 4, "checkpoint_every": 0},
    )

    def choose(pending: int) -> int | None:
        index = data.draw(st.integers(-1, pending - 1))
        return None if index < 0 else index

    run_dir = tmp_path_factory.mktemp("run") / "run"
    model = load_model(resolve("tiny-random"), attn_implementation=ATTENTION)
    workplace = Workplace(
        config,
        ChosenPool(choose),
        model,
        Engine(model, config.engine, "tiny"),
        load_algorithm(config.algorithm),
    )
    with RunFolder.create(run_dir, config) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.line.line.DecodeCost", AlwaysAhead)
        Run(workplace, folder, Observer(), lambda: False).run(resume=False)
    check_books(run_dir, config)


@pytest.mark.parametrize("bound", BOUNDS)
def test_environments_that_sleep_at_random_and_kills_in_between(bound: int, tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        """
    def tasks(self, split):
        for i in range(1000):
            yield {"prompt": f"task {i}", "i": i}

    def reward(self, task, completion):
        time.sleep(random.random() ** 4 * 0.2)
        return float((task["i"] + len(completion)) % 3)
""",
    )
    config = settings(
        environment={"name": name, "workers": 2},
        sampling={"max_tokens": 12},
        line={"max_staleness": bound, "steps": 6, "decode_steps": 1, "checkpoint_every": 2},
    )
    run_dir = tmp_path / "run"
    chance = random.Random(bound)
    line = Line.from_config(config, run_dir)
    for _ in range(3):
        try:
            line.run(KillAt(chance.randrange(5, 60)))
        except Killed:
            line = Line.resume(run_dir)
        else:
            break
    else:
        line.run()
    ages = check_books(run_dir, config)
    assert bound == 0 or max(ages) > 0, "an asynchronous run is stale now and then"
