"""Environments that hold few episodes at once: the line waits for their places, and no attempt fails for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from line_cases import Messages, check_books, environment_file, lines_of, settings

from headrace import Line
from headrace.config import Config

SLOW = """
    live = 0

    def tasks(self, split):
        return [{"prompt": f"task {i}"} for i in range(50)]

    def reset(self, task):
        World.live += 1
        assert World.live <= PLACES, "more episodes than places"
        self.turn = 0
        return task["prompt"]

    def step(self, action):
        self.turn += 1
        time.sleep(0.05)
        answer = [{"role": "user", "content": "go on"}]
        return {"observation": {"messages": answer}, "reward": len(action.text) % 3, "done": self.turn == 2}

    def close(self):
        World.live -= 1
"""


def few_places(folder: Path, places: int, **sections: Any) -> Config:
    return settings(
        environment={
            "name": environment_file(folder, SLOW.replace("PLACES", str(places))),
            "episodes_per_worker": places,
            "episode_timeout_s": 1.0,
        },
        sampling={"max_tokens": 4},
        engine={"context_length": 512},
        line={"steps": 3, "groups_per_step": 4, "wait_timeout_s": 30.0},
        **sections,
    )


@pytest.mark.parametrize("places", [1, 2, 3])
def test_waiting_for_a_place_fails_no_attempt(tmp_path: Path, places: int) -> None:
    """8 groups of 2 would be admitted at once; a world of one place takes longer for them than an episode may."""
    config = few_places(tmp_path, places)
    messages = Messages()
    Line.from_config(config, tmp_path / "run").run(messages)
    check_books(tmp_path / "run", config)
    failures = sum(m["environment_failures"] for m in lines_of(tmp_path / "run", "metrics.jsonl"))
    assert failures == 0, messages.texts


def test_held_out_reward_is_of_all_tasks(tmp_path: Path) -> None:
    config = few_places(tmp_path, 2, eval={"tasks": 12})
    result = Line.from_config(config, tmp_path / "run").run()
    assert result.before is not None
    assert len(result.before.tasks) == 12
    assert result.before.failed == 0
