"""The int8 rows: measures of the mismatch, and curves held against the noise of seeds."""

from itertools import islice

import pytest

from benchmarks import int8, peers
from headrace.config import Config
from headrace.environments import load_environment


def test_float32_rollouts_have_the_trainers_policy():
    found = int8.mismatch("tiny-random", {"a": int8.QUESTIONS[:1], "b": int8.QUESTIONS[1:3]}, 300, "float32")
    assert found["all"]["tokens"] == sum(source["tokens"] for source in found["sources"].values()) >= 300
    assert set(found["sources"]) == {"a", "b"}
    assert found["all"]["ess"] == pytest.approx(1.0, abs=1e-6)
    assert 0 <= found["all"]["kl"] < 1e-9
    with pytest.raises(peers.PeerError, match="the sampled policy is the float32 one"):
        int8.ess_row(found)


def test_the_row_is_about_all_tokens():
    everything = {"tokens": 10_500, "ess": 0.85, "kl": 0.01, "difference_mean": 0.05, "ratio_max": 3.0}
    row = int8.ess_row({"all": everything, "sources": {"a": everything | {"ess": 0.99}}})
    assert (row.headrace, row.met) == (0.85, False)
    assert "10500 tokens" in row.what


def test_prompts_are_of_several_kinds():
    sources = int8.sources()
    assert len(sources) == 1 + len(int8.ENVIRONMENTS)
    assert all(len(set(prompts)) >= int8.TASKS_OF_EACH // 2 for prompts in sources.values())


def test_a_distance_counts_standard_deviations_of_a_seed():
    assert int8.distance([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx(1.0)
    assert int8.distance([0.5, 0.5], [0.5, 0.5]) == 0.0
    # Unequal deviations: √((1 + 4) / 2).
    assert int8.distance([1.0, 2.0, 3.0], [0.0, 2.0, 4.0]) == 0.0
    assert int8.distance([2.0, 3.0, 4.0], [0.0, 2.0, 4.0]) == pytest.approx((2 / 5) ** 0.5)


def test_a_curve_is_as_good_as_the_worse_of_its_end_and_its_area():
    rising = [[0.1 * i + offset for i in range(10)] for offset in (0.00, 0.02, 0.04)]
    late = [[0.0] * 7 + curve[7:] for curve in rising]
    row = int8.curve_row("int8_curve_long", {"float32": rising, "int8": late})
    assert row.details["distances"]["end"] == pytest.approx(0.0)
    assert row.headrace == row.details["distances"]["area"] > 1
    assert row.target == pytest.approx(2 * (2 / 3) ** 0.5)
    assert row.met is False
    assert int8.curve_row("int8_curve_long", {"float32": rising, "int8": rising}).met


@pytest.mark.parametrize("config", int8.CURVES.values(), ids=lambda path: path.name)
def test_the_tasks_of_the_curves_run_with_int8(config):
    loaded = Config.load(config, int8.runs.INT8)
    assert loaded.line.steps == int8.STEPS
    assert loaded.engine.weight_format == "int8"


def test_the_longer_task_rewards_short_words_and_the_wanted_number_of_them():
    config = Config.load(int8.CURVES["int8_curve_long"])
    environment = load_environment(config.environment.name, {"words": 4})
    train = {task["prompt"] for task in islice(environment.tasks("train"), 300)}
    test = {task["prompt"] for task in islice(environment.tasks("test"), 300)}
    assert not train & test
    task = {"prompt": ""}
    for completion, reward in (
        ("Snow is cold, white.", 1.0),
        ("Snow is cold and white, all day.", 4 / 7),
        ("Snowflakes crystallise in clouds.", 0.25),
        ("Snow is", 0.5),
        ("1, 2, 3!", 0.0),
    ):
        assert environment.reward(task, completion) == pytest.approx(reward)
