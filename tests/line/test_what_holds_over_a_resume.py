"""What a resumed run keeps: the settings of recorded gradients, its judgements, its prompts, its evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from line_cases import KillAt, Killed, Messages, check_books, environment_file, lines_of, settings
from test_recovery import events
from test_resume_edges import edit

from headrace import Line, Observer
from headrace.config import Config
from headrace.line.replay import replay
from headrace.line.run import Run


class KillInMidStep(Observer):
    """Dies after so many gradients of a step, some of which are taken and some are not."""

    def __init__(self, step: int, gradients: int = 1) -> None:
        self.step, self.gradients = step, gradients
        self.doing = ""

    def on_status(self, status: Any) -> None:
        taken, self.doing = self.doing == "gradient", status.doing
        self.gradients -= taken and status.step == self.step
        if not self.gradients:
            raise Killed


def digests(run_dir: Path) -> dict[int, str]:
    return {step.step: step.digest for step in events(run_dir, "step")}


def small_steps(**sections: Any) -> Config:
    """Several gradients per step."""
    return settings(
        line={"steps": 6, "checkpoint_every": 0, "groups_per_step": 4},
        sampling={"max_tokens": 9},
        trainer={"learning_rate": 1e-3, "micro_batch_tokens": 8},
        **sections,
    )


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_recorded_gradients_keep_their_settings(tmp_path: Path, checkpoint_every: int) -> None:
    """Edited in mid-step: recorded steps come out equal, the step under way is completed as begun, then it changes."""
    config = small_steps()
    config = config.model_copy(
        update={"line": config.line.model_copy(update={"checkpoint_every": checkpoint_every})}
    )
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillInMidStep(2))
    before = digests(tmp_path / "run")
    assert set(before) == {1, 2}
    edit(tmp_path / "run", "learning_rate = 0.001", "learning_rate = 0.0005")
    messages = Messages()
    Line.resume(tmp_path / "run").run(messages)
    assert {step: digests(tmp_path / "run")[step] for step in before} == before
    assert any("step 3 has gradients already" in text and "from step 4 on" in text for text in messages.texts)
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "run", "metrics.jsonl")]
    assert rates == [1e-3] * 3 + [5e-4] * 3
    assert not events(tmp_path / "run", "base"), "no other bits came out"
    check_books(tmp_path / "run", config)
    assert all(step.equal for step in replay(tmp_path / "run"))


def test_settings_hold_at_once_where_nothing_is_recorded(tmp_path: Path) -> None:
    config = small_steps()

    class KillAtStep(Observer):
        def on_step(self, metrics: Any) -> None:
            if metrics["step"] == 2:
                raise Killed

    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAtStep())
    edit(tmp_path / "run", "learning_rate = 0.001", "learning_rate = 0.0005")
    Line.resume(tmp_path / "run").run()
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "run", "metrics.jsonl")]
    assert rates == [1e-3] * 2 + [5e-4] * 4


def test_a_users_algorithm_that_was_edited_retakes_the_kept_copy(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = """
from headrace.algorithms import Algorithm


class Mine(Algorithm):
    def advantages(self, groups):
        return [[sample.reward - 0.5 for sample in group] for group in groups]

    def loss(self, tokens):
        return -FACTOR * tokens.advantages * tokens.logp
"""
    file.write_text(source.replace("FACTOR", "1.0"))
    config = small_steps(algorithm={"name": f"{file}:Mine"})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillInMidStep(2))
    before = digests(tmp_path / "run")
    file.write_text(source.replace("FACTOR", "0.25"))
    Line.resume(tmp_path / "run").run()
    assert {step: digests(tmp_path / "run")[step] for step in before} == before
    assert not events(tmp_path / "run", "base")
    assert len(list((tmp_path / "run" / "algorithms").iterdir())) == 2
    check_books(tmp_path / "run", config)
    assert all(step.equal for step in replay(tmp_path / "run"))


def test_the_first_step_after_a_resume_compares_its_own_tokens(tmp_path: Path) -> None:
    """Not those of every step that was taken again."""
    config = small_steps()
    config = config.model_copy(update={"line": config.line.model_copy(update={"max_staleness": 0})})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillInMidStep(4))
    Line.resume(tmp_path / "run").run()
    for metrics in lines_of(tmp_path / "run", "metrics.jsonl"):
        # On-policy these are the step's own, or of its probe.
        assert metrics["logprob_diff_tokens"] in (metrics["tokens_trained"], metrics["tokens_generated"])


def test_prompts_are_not_rendered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another day, with a template that prints the date, it is trained on what it was sampled after."""
    from headrace.line import setup

    encode = setup.encode_task_prompt
    day = ["2024-07-26 "]

    def dated(tokenizer: Any, prompt: Any) -> list[int]:
        return encode(tokenizer, day[0]) + encode(tokenizer, prompt)

    monkeypatch.setattr(setup, "encode_task_prompt", dated)
    config = settings(line={"steps": 5, "checkpoint_every": 0}, sampling={"max_tokens": 9})
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAt(25))
    prompts = {event.group: event.prompt_ids for event in events(tmp_path / "run", "admit")}
    day[0] = "1999-12-31 "
    Line.resume(tmp_path / "run").run()
    rows = lines_of(tmp_path / "run", "trajectories.jsonl")
    old = [row for row in rows if row["group"] in prompts]
    assert old
    for row in old:
        prompt = prompts[row["group"]]
        assert row["token_ids"][: len(prompt)] == list(prompt)
    assert all(step.equal for step in replay(tmp_path / "run"))


@pytest.mark.parametrize("how", ["missing", "torn", "raised"])
def test_the_first_evaluation_is_made_up_for_in_step_1(tmp_path: Path, how: str) -> None:
    """Groups are under way, and the generator answers the held-out tasks beside nothing of theirs."""
    tasks = 0 if how == "raised" else 3
    config = settings(
        eval={"tasks": tasks}, line={"steps": 3, "checkpoint_every": 0}, sampling={"max_tokens": 20}
    )
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillAt(3))
    path = tmp_path / "run" / "evaluation-before.json"
    if how == "raised":
        edit(tmp_path / "run", "tasks = 0", "tasks = 3")
    elif how == "missing":
        path.unlink()
    else:
        path.write_text('{"step": 0, "rew')
    result = Line.resume(tmp_path / "run").run()
    assert result.before is not None
    assert result.before.step == 0
    assert len(result.before.tasks) == 3
    check_books(tmp_path / "run", config)


def test_held_out_tasks_that_are_too_long_are_skipped_and_counted(tmp_path: Path) -> None:
    body = """
    def tasks(self, split):
        return [{"prompt": "x" * (1 + 400 * (split == "test" and i % 2)), "i": i} for i in range(6)]

    def reward(self, task, completion):
        return float(len(completion) % 2)
"""
    config = settings(
        environment={"name": environment_file(tmp_path, body)}, eval={"tasks": 6}, line={"steps": 1}
    )
    result = Line.from_config(config, tmp_path / "run").run()
    assert result.after is not None
    assert (len(result.after.tasks), result.after.skipped, result.after.failed) == (3, 3, 0)
    taken = {event.name: event.skipped for event in events(tmp_path / "run", "evaluation")}
    assert taken == {"before": 3, "after": 3}


def test_the_memory_of_a_low_ess_is_kept(tmp_path: Path) -> None:
    """One judgement below the limit before a crash and one after it are two in a row."""
    config = small_steps()
    with pytest.raises(Killed):
        Line.from_config(config, tmp_path / "run").run(KillInMidStep(3))
    from headrace.line import resume

    kept: list[Any] = []
    take_up = resume.restore

    def spy(record: Any, *arguments: Any) -> Any:
        outcome = take_up(record, *arguments)
        kept.append(record.state.memory)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.line.run.restore", spy)
        patch.setattr(Run, "_make_line", lambda self: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            Line.resume(tmp_path / "run").run()
    drawn = sum(line["logprob_diff_tokens"] for line in lines_of(tmp_path / "run", "metrics.jsonl"))
    assert kept[0].recent.tokens == drawn, "tokens of earlier steps that are still to be judged"
