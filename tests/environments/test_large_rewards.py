"""Rewards that each are valid, and whose sum is none, cost the attempt and not the run."""

from pathlib import Path

import pytest
from line_cases import check_books, environment_file, lines_of, settings

from headrace import Line
from headrace.environments import episode_reward
from headrace.environments.validation import MAX_REWARD
from headrace.errors import EnvironmentSetupError
from headrace.line.replay import replay

WORLD = """
    seen = {}

    def tasks(self, split):
        return [{"i": i} for i in range(50)]

    def reset(self, task):
        self.turn = 0
        self.large = task["i"] not in self.seen
        self.seen[task["i"]] = True
        return f"task {task['i']}"

    def step(self, action):
        self.turn += 1
        reward = 0.9 * LARGEST if self.large else len(action.text)
        return {"observation": "and now?", "reward": reward, "done": self.turn == ENDS_AT}
"""


def test_a_sum_is_checked_as_a_reward_is() -> None:
    assert episode_reward([]) == 0.0
    assert episode_reward([MAX_REWARD, MAX_REWARD, -MAX_REWARD]) == MAX_REWARD
    for turn_rewards in ([MAX_REWARD, MAX_REWARD], [-MAX_REWARD] * 2, [1e308, 1e308], [float("nan")]):
        with pytest.raises(EnvironmentSetupError, match=r"turns add up to .*; keep the sum between -1e\+"):
            episode_reward(turn_rewards)


@pytest.mark.parametrize("ends_at", [2, 99])  # by itself, or cut at two turns
def test_an_episode_whose_rewards_add_up_to_too_much_is_a_failed_attempt(
    tmp_path: Path, ends_at: int
) -> None:
    body = WORLD.replace("LARGEST", repr(MAX_REWARD)).replace("ENDS_AT", str(ends_at))
    config = settings(
        environment={"name": environment_file(tmp_path, body), "max_turns": 2, "workers": 1},
        engine={"context_length": 256},
        line={"steps": 2},
    )
    Line.from_config(config, tmp_path / "run").run()
    check_books(tmp_path / "run", config)
    trajectories = lines_of(tmp_path / "run", "trajectories.jsonl")
    assert all(t["reward"] < 100 for t in trajectories)
    assert 1 in {t["attempt"] for t in trajectories}
    metrics = lines_of(tmp_path / "run", "metrics.jsonl")
    assert sum(m["environment_failures"] for m in metrics) >= 1
    assert all(step.equal for step in replay(tmp_path / "run"))
