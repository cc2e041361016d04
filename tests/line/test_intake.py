"""Tasks whose prompts do not fit the context are passed over, and a run that finds no other ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_cases import Messages, check_books, environment_file, lines_of, settings

from headrace import Line
from headrace.config import Config
from headrace.errors import RunError
from headrace.line.intake import SKIPPED_LIMIT


def with_prompts(folder: Path, prompt: str) -> Config:
    body = f"""
    def tasks(self, split):
        for i in itertools.count():
            yield {{"prompt": {prompt}, "i": i}}

    def reward(self, task, completion):
        return float(len(completion) % 2)
"""
    return settings(environment={"name": environment_file(folder, body, imports="import itertools")})


def test_tasks_that_do_not_fit_are_passed_over(tmp_path: Path) -> None:
    config = with_prompts(tmp_path, '"x" * (1 + 200 * (i % 3))')
    messages = Messages()
    Line.from_config(config, tmp_path / "run").run(messages)
    check_books(tmp_path / "run", config)
    tasks = {t["group"]: t["task"]["i"] for t in lines_of(tmp_path / "run", "trajectories.jsonl")}
    assert all(task == 3 * group for group, task in tasks.items())
    skipped = sum(m["tasks_skipped"] for m in lines_of(tmp_path / "run", "metrics.jsonl"))
    said = [text for text in messages.texts if text.startswith("task ") and "does not leave room" in text]
    assert 0 < skipped <= len(said)


def test_nothing_but_tasks_that_do_not_fit_ends_the_run(tmp_path: Path) -> None:
    config = with_prompts(tmp_path, '"x" * (1 + 200 * (i > 0))')
    with pytest.raises(RunError, match=f"{SKIPPED_LIMIT} tasks in a row do not fit the context: a prompt of"):
        Line.from_config(config, tmp_path / "run").run()
