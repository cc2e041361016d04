"""Held-out accuracy: greedy answers to the environment's test tasks, with its own reward.

Invariant: the model's own weights answer, the ones that a run saves, whatever format rollouts are made with.
"""

from __future__ import annotations

import time

from headrace.errors import LineStuckError
from headrace.line.observer import EvaluatedTask, Evaluation
from headrace.line.setup import Workplace
from headrace.types import Sampling


def evaluate(workplace: Workplace, step: int) -> Evaluation:
    """Answer the held-out tasks at temperature 0, with the weights that `step` optimizer steps have made.

    A task whose environment fails is reported and left out of the accuracy: a failure is not a reward.

    Raises:
        LineStuckError: rewards did not come within `line.wait_timeout_s`.
    """
    config, pool = workplace.config, workplace.pool
    tasks = [held_out.task for held_out in workplace.held_out]
    prompts = [held_out.prompt_ids for held_out in workplace.held_out]
    sampling = Sampling(
        temperature=0.0, max_tokens=config.sampling.max_tokens, stop=tuple(config.sampling.stop)
    )
    outputs = workplace.unquantised_engine().generate(prompts, sampling) if prompts else []
    completions = [output.samples[0].text for output in outputs]
    for index, (task, completion) in enumerate(zip(tasks, completions, strict=True)):
        pool.submit(("evaluation", index), task, completion)
    rewards: dict[int, float | None] = {}
    deadline = time.monotonic() + config.line.wait_timeout_s
    while len(rewards) < len(tasks):
        left = deadline - time.monotonic()
        if left <= 0:
            raise LineStuckError(
                f"evaluation waited {config.line.wait_timeout_s:g} s (line.wait_timeout_s) for the rewards of "
                f"{len(tasks) - len(rewards)} of {len(tasks)} test tasks"
            )
        for reply in pool.wait(left):
            rewards[reply.key[1]] = reply.reward
    valid = [reward for reward in rewards.values() if reward is not None]
    return Evaluation(
        step=step,
        accuracy=sum(valid) / len(valid) if valid else float("nan"),
        tasks=[
            EvaluatedTask(prompt_text(task["prompt"]), completion, rewards[index])
            for index, (task, completion) in enumerate(zip(tasks, completions, strict=True))
        ],
        failed=len(tasks) - len(valid),
    )


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """A prompt as a person reads it: the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
