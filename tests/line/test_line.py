"""The whole line on the tiny model: it learns, it accounts for every token, it ends with clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from line_cases import Messages, check_books, environment_file, lines_of, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace import Line, LineStatus, Observer
from headrace.errors import EnvironmentFailure, LineStuckError, NonFiniteError, RunError, UserError

COUNTING = """
    def tasks(self, split):
        i = 0
        while True:
            yield {"prompt": f"task {i}", "i": i}
            i += 1
"""


def test_it_learns(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        COUNTING
        + """
    def reward(self, task, completion):
        return sum(c in "aeiou" for c in completion) / 8
""",
    )
    config = settings(
        environment={"name": name},
        sampling={"max_tokens": 8},
        algorithm={"group_size": 8},
        trainer={"learning_rate": 1e-2},
        engine={"max_sequences": 32},
        line={"groups_per_step": 4, "steps": 25, "checkpoint_every": 0},
    )
    result = Line.from_config(config, tmp_path / "run").run()
    assert sum(result.rewards[-3:]) / 3 > sum(result.rewards[:3]) / 3 + 0.2


def test_the_run_folder_holds_what_it_should(tmp_path: Path) -> None:
    config = settings(eval={"tasks": 4})
    result = Line.from_config(config, tmp_path / "run").run()
    ages = check_books(result.run_dir, config)
    assert result.before is not None
    assert result.after is not None
    assert len(result.after.tasks) == 4
    wanted = [
        "step",
        "policy_version",
        "reward_mean",
        "completed_ratio",
        "completion_tokens_mean",
        "zero_advantage_groups",
        "loss",
        "grad_norm",
        "logprob_diff_mean",
        "logprob_diff_max",
        "ess",
        "staleness_mean",
        "staleness_max",
        "time_step_s",
        "time_decode_s",
        "time_gradient_s",
        "time_optimizer_s",
        "time_publish_s",
        "time_idle_s",
        "tokens_generated",
        "tokens_trained",
        "effective_tokens_per_s",
        "memory_mb",
    ]
    metrics = lines_of(result.run_dir, "metrics.jsonl")
    assert all(key in line for line in metrics for key in wanted)
    assert max(line["staleness_max"] for line in metrics) == max(ages)
    parts = ("decode", "gradient", "optimizer", "publish", "idle", "other")
    for line in metrics:
        assert sum(line[f"time_{part}_s"] for part in parts) == pytest.approx(line["time_step_s"], rel=0.02)
    model = AutoModelForCausalLM.from_pretrained(result.run_dir / "final")
    assert model.config._attn_implementation != "headrace"
    assert AutoTokenizer.from_pretrained(result.run_dir / "final").chat_template
    assert json.loads((result.run_dir / "evaluation-after.json").read_text())["step"] == config.line.steps
    assert list((result.run_dir / "tensorboard").iterdir())


def test_the_generators_numbers_are_the_trainers(tmp_path: Path) -> None:
    config = settings(model={"dtype": "float64"}, line={"steps": 6}, sampling={"max_tokens": 12})
    Line.from_config(config, tmp_path / "run").run()
    differences = [m["logprob_diff_max"] for m in lines_of(tmp_path / "run", "metrics.jsonl")]
    measured = [d for d in differences if d is not None]
    assert measured
    assert max(measured) < 1e-12


def test_a_strictly_on_policy_run_has_no_stale_token(tmp_path: Path) -> None:
    config = settings(line={"max_staleness": 0})
    Line.from_config(config, tmp_path / "run").run()
    assert set(check_books(tmp_path / "run", config)) == {0}


def test_failed_rewards_are_retried_and_never_zero(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        COUNTING
        + """
    seen = {}

    def reward(self, task, completion):
        if completion == "":  # the check before the run
            return 1.0
        n = self.seen[task["i"]] = self.seen.get(task["i"], 0) + 1
        if n == 1:
            raise ValueError("the sandbox died")
        return 1.0 + n
""",
    )
    config = settings(environment={"name": name})
    messages = Messages()
    Line.from_config(config, tmp_path / "run").run(messages)
    check_books(tmp_path / "run", config)
    trajectories = lines_of(tmp_path / "run", "trajectories.jsonl")
    assert all(t["reward"] > 1 for t in trajectories)
    assert {t["attempt"] for t in trajectories} == {0, 1}
    metrics = lines_of(tmp_path / "run", "metrics.jsonl")
    assert sum(m["environment_failures"] for m in metrics) >= 8
    assert sum(m["ledger_environment_failed"] for m in metrics) > 0
    assert any("the sandbox died" in text for text in messages.texts)


def test_an_environment_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        COUNTING
        + """
    def reward(self, task, completion):
        if completion:
            raise ValueError("no sandbox is left")
        return 0.0
""",
    )
    with pytest.raises(EnvironmentFailure, match="no sandbox is left"):
        Line.from_config(settings(environment={"name": name}), tmp_path / "run").run()


def test_a_wait_has_a_name_and_a_deadline(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        COUNTING
        + """
    def reward(self, task, completion):
        if completion:
            time.sleep(60)
        return 0.0
""",
    )
    config = settings(environment={"name": name, "timeout_s": 50}, line={"wait_timeout_s": 0.5})
    with pytest.raises(LineStuckError, match=r"waited .* for the rewards of \d+ trajectories"):
        Line.from_config(config, tmp_path / "run").run()


def test_groups_without_advantage_are_counted_or_replaced(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path,
        COUNTING
        + """
    def reward(self, task, completion):
        return 0.0 if task["i"] % 2 else float(len(completion))
""",
    )
    counted = settings(environment={"name": name}, sampling={"max_tokens": 9})
    Line.from_config(counted, tmp_path / "counted").run()
    metrics = lines_of(tmp_path / "counted", "metrics.jsonl")
    assert sum(m["zero_advantage_groups"] for m in metrics) >= 3
    assert sum(m["ledger_zero_advantage"] for m in metrics) > 0
    replaced = settings(
        environment={"name": name}, sampling={"max_tokens": 9}, algorithm={"zero_advantage": "replace"}
    )
    Line.from_config(replaced, tmp_path / "replaced").run()
    check_books(tmp_path / "replaced", replaced)
    metrics = lines_of(tmp_path / "replaced", "metrics.jsonl")
    assert sum(m["groups_replaced"] for m in metrics) >= 3
    assert sum(m["zero_advantage_groups"] for m in metrics) == 0


def test_replacement_of_hopeless_groups_ends(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path, COUNTING + "\n    def reward(self, task, completion):\n        return 1.0\n"
    )
    config = settings(environment={"name": name}, algorithm={"zero_advantage": "replace"}, line={"steps": 2})
    Line.from_config(config, tmp_path / "run").run()
    metrics = lines_of(tmp_path / "run", "metrics.jsonl")
    assert [m["zero_advantage_groups"] for m in metrics] == [2, 2]
    assert all(m["grad_norm"] == 0 for m in metrics)
    assert [m["policy_version"] for m in metrics] == [1, 2]


def test_truncated_completions_can_be_masked(tmp_path: Path) -> None:
    config = settings(algorithm={"mask_truncated": True})
    Line.from_config(config, tmp_path / "run").run()
    metrics = lines_of(tmp_path / "run", "metrics.jsonl")
    assert sum(m["ledger_masked"] for m in metrics) > 0


def test_weights_that_break_stop_the_run_with_the_culprits_saved(tmp_path: Path) -> None:
    name = environment_file(
        tmp_path, COUNTING + "\n    def reward(self, task, completion):\n        return random.random()\n"
    )
    config = settings(environment={"name": name}, trainer={"learning_rate": 1e30})
    with pytest.raises(NonFiniteError, match="failures/step-"):
        Line.from_config(config, tmp_path / "run").run()
    saved = list((tmp_path / "run" / "failures").iterdir())
    assert saved
    assert json.loads(saved[0].read_text().splitlines()[0])["token_ids"]


def test_a_reference_model_and_the_proximal_ratio(tmp_path: Path) -> None:
    config = settings(algorithm={"kl_coef": 0.1, "ratio": "proximal", "loss_aggregation": "sequence"})
    Line.from_config(config, tmp_path / "run").run()
    check_books(tmp_path / "run", config)


def test_keeping_kv_over_an_update_labels_tokens(tmp_path: Path) -> None:
    config = settings(engine={"kv_on_update": "keep"}, sampling={"max_tokens": 20}, line={"steps": 6})
    Line.from_config(config, tmp_path / "run").run()
    check_books(tmp_path / "run", config)


def test_a_disagreement_about_log_probs_stops_the_run(tmp_path: Path) -> None:
    config = settings(line={"logprob_diff_limit": 1e-12})
    with pytest.raises(RunError, match="trainer and generator disagree"):
        Line.from_config(config, tmp_path / "run").run()


def test_stop_and_resume_in_the_middle_of_a_step(tmp_path: Path) -> None:
    config = settings(line={"steps": 5, "checkpoint_every": 0}, sampling={"max_tokens": 12})
    line = Line.from_config(config, tmp_path / "run")

    class StopSoon(Observer):
        units = 0

        def on_status(self, status: LineStatus) -> None:
            self.units += 1
            if self.units == 9:
                line.stop()

    assert line.run(StopSoon()).interrupted
    resumed = Line.resume(tmp_path / "run").run()
    assert not resumed.interrupted
    check_books(tmp_path / "run", config)


def test_tasks_go_on_where_they_were(tmp_path: Path) -> None:
    """Groups of a resumed run are those that the run would have had: none twice, none left out."""
    name = environment_file(
        tmp_path,
        COUNTING + "\n    def reward(self, task, completion):\n        return float(len(completion) % 2)\n",
    )
    config = settings(environment={"name": name}, line={"steps": 6})
    line = Line.from_config(config, tmp_path / "run")

    class StopAfterStep(Observer):
        def on_step(self, metrics: object) -> None:
            line.stop()

    line.run(StopAfterStep())
    Line.resume(tmp_path / "run").run()
    tasks = {t["group"]: t["task"]["i"] for t in lines_of(tmp_path / "run", "trajectories.jsonl")}
    assert all(group == task for group, task in tasks.items())


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    config = settings()
    Line.from_config(config, tmp_path / "run").run()
    result = Line.resume(tmp_path / "run").run()
    assert len(result.metrics) == config.line.steps


def test_an_existing_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="exists already"):
        Line.from_config(settings(), tmp_path / "run").run()
