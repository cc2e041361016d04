"""Held-out reward: greedy answers to the environment's test tasks, with its own reward.

Invariant: the model's own weights answer, the ones that a run saves, whatever format rollouts are made with.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from headrace.errors import LineStuckError
from headrace.line.episodes import Episodes, rollout_sampling
from headrace.line.observer import EvaluatedTask, Evaluation
from headrace.line.setup import Workplace
from headrace.schedule import Ledger
from headrace.types import Group


def evaluate(workplace: Workplace, step: int) -> Evaluation:
    """Answer the held-out tasks at temperature 0, with the weights that `step` optimizer steps have made.

    A task whose environment fails is reported and left out of the mean: a failure is not a reward.

    Raises:
        LineStuckError: the environment did not answer within `line.wait_timeout_s`.
    """
    config, pool = workplace.config, workplace.pool
    engine = workplace.unquantised_engine()
    one = config.algorithm.model_copy(update={"group_size": 1})
    episodes = Episodes(
        config.model_copy(update={"algorithm": one}),
        engine,
        pool,
        Ledger(),
        lambda failure: None,
        replace(rollout_sampling(config), temperature=0.0),
        max_attempts=1,
    )
    for index, held_out in enumerate(workplace.held_out):
        episodes.start(Group(index, held_out.task, held_out.prompt_ids, 0))
    heard = time.monotonic()
    while episodes.at_environment or engine.num_unfinished:
        for event in engine.step():
            episodes.on_token(event)
        left = heard + config.line.wait_timeout_s - time.monotonic()
        replies = pool.poll() if engine.num_unfinished else pool.wait(max(0.0, left))
        for reply in replies:
            episodes.on_reply(reply)
        if replies or engine.num_unfinished:
            heard = time.monotonic()
        elif left <= 0 and episodes.at_environment:
            raise LineStuckError(
                f"evaluation waited {config.line.wait_timeout_s:g} s (line.wait_timeout_s) for the environment of "
                f"{len(episodes.at_environment)} of {len(workplace.held_out)} test tasks"
            )
    answers = [
        _answer(held_out.task, episodes.groups[index]) for index, held_out in enumerate(workplace.held_out)
    ]
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    return Evaluation(
        step=step,
        reward=sum(rewards) / len(rewards) if rewards else float("nan"),
        tasks=answers,
        failed=len(answers) - len(rewards),
    )


def _answer(task: dict[str, Any], group: Group) -> EvaluatedTask:
    trajectory = group.samples[0]
    prompt = prompt_text(task["prompt"]) if "prompt" in task else str(task)
    if trajectory is None:
        return EvaluatedTask(prompt, "", None)
    return EvaluatedTask(prompt, trajectory.completion, trajectory.reward)


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as a person reads it: the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
