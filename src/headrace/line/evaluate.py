"""Held-out reward: greedy answers to the environment's test tasks, with its own reward.

Invariants
* The model's own weights answer, the ones that a run saves, whatever format rollouts are made with.
* The same episodes and the same fold as in training, in a state of their own that no journal keeps.
* A task that fails or does not fit is counted and left out of the mean; a failure is not a reward.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from headrace.config import Config
from headrace.errors import LineStuckError
from headrace.line.cell import LocalCell
from headrace.line.episodes import Episodes
from headrace.line.record import Record
from headrace.line.rollouts import Rollouts
from headrace.line.setup import Workplace
from headrace.runs.events import GroupAdmitted
from headrace.runs.results import EvaluatedTask, Evaluation
from headrace.runs.state import RunState
from headrace.schedule.units import POLICY, Decode, PolicyVersion
from headrace.types import Sampling

DECODE_STEPS = 8
"""Engine steps between two looks at what the environment has answered."""


def rollout_sampling(config: Config) -> Sampling:
    """How rollouts of a run are drawn."""
    settings = config.sampling
    return Sampling(
        temperature=settings.temperature, max_tokens=settings.max_tokens, stop=tuple(settings.stop)
    )


def evaluate(workplace: Workplace, step: int) -> Evaluation:
    """Answer the held-out tasks at temperature 0, with the weights that `step` optimizer steps have made.

    Raises:
        LineStuckError: the environment did not answer within `line.wait_timeout_s`.
    """
    held_out = workplace.held_out
    if not held_out:
        return Evaluation(step, float("nan"), [], 0, workplace.skipped)
    config, pool = workplace.config, workplace.pool
    engine = workplace.unquantised_engine()
    policy = PolicyVersion(POLICY, 0, engine.weights_id)
    cell = LocalCell(policy._replace(number=engine.version), engine, None, name="evaluation")
    record = Record(None)
    record.state.begin(_one_sample_each(config, len(held_out)), pool.multi_turn, policy)
    greedy = replace(rollout_sampling(config), temperature=0.0)
    episodes = Episodes(record.state, workplace.model, engine.context_length, greedy, max_attempts=1)
    rollouts = Rollouts(record, episodes, pool, lambda failure: None)
    waiting = list(enumerate(held_out))
    heard = time.monotonic()
    while waiting or not all(group.finished for group in record.state.groups.values()):
        while waiting and _has_place(rollouts):
            index, task = waiting.pop(0)
            record.emit(GroupAdmitted(index, task.task, tuple(task.prompt_ids), index + 1, 0))
            record.commit()
        decoding = rollouts.decodable
        if decoding:
            unit = Decode(tuple(wanted.id for wanted in rollouts.wanted), DECODE_STEPS)
            rollouts.take_decoded(
                cell.name, replace(cell.run(rollouts.loaded(unit, cell.name, 0)), version=0)
            )
            record.commit()
        left = heard + config.line.wait_timeout_s - time.monotonic()
        replies = pool.poll() if decoding else pool.wait(max(0.0, left))
        rollouts.take_replies(replies)
        record.commit()
        if replies or decoding:
            heard = time.monotonic()
        elif left <= 0:
            raise LineStuckError(
                f"evaluation waited {config.line.wait_timeout_s:g} s (line.wait_timeout_s) for the environment of "
                f"{len(rollouts.at_environment)} of {len(held_out)} test tasks"
            )
    answers = [_answer(task.task, record.state, index) for index, task in enumerate(held_out)]
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    return Evaluation(
        step=step,
        reward=sum(rewards) / len(rewards) if rewards else float("nan"),
        tasks=answers,
        failed=len(answers) - len(rewards),
        skipped=workplace.skipped,
    )


def _has_place(rollouts: Rollouts) -> bool:
    free = rollouts.pool.free_places
    return free is None or free > 0


def _one_sample_each(config: Config, tasks: int) -> Config:
    """The settings under which every task is a group of one sample, and all of them may be answered at once."""
    algorithm = config.algorithm.model_copy(update={"group_size": 1})
    line = config.line.model_copy(update={"groups_per_step": tasks, "steps": 1, "max_staleness": 0})
    return config.model_copy(update={"algorithm": algorithm, "line": line})


def _answer(task: dict[str, Any], state: RunState, index: int) -> EvaluatedTask:
    attempt = state.groups[index].attempts[0]
    prompt = prompt_text(task["prompt"]) if "prompt" in task else str(task)
    if attempt is None:
        return EvaluatedTask(prompt, "", None)
    return EvaluatedTask(prompt, attempt.trajectory.completion, attempt.trajectory.reward)


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as a person reads it: the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
