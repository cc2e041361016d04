"""What can be known about a run without loading weights or creating anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config
from headrace.engine import check_prompt_length, context_limit
from headrace.environments import EnvironmentPool
from headrace.line.evaluate import prompt_text
from headrace.line.setup import check_observation, memory_estimate
from headrace.models import encode_task_prompt, resolve
from headrace.models.load import context_length, load_tokenizer, read_config, refuse_unsupported
from headrace.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class DryRun:
    """The first task's prompt, its length in tokens, the context's, and memory by use in MB."""

    prompt: str
    prompt_tokens: int
    context_tokens: int
    memory_mb: dict[str, float]


def dry_run(config: Config, run_dir: str | Path | None = None) -> DryRun:
    """Check the settings against the model's folder and the environment's first task.

    Raises:
        UserError: what a run would refuse, as far as it shows without the weights.
    """
    if run_dir is not None:
        RunFolder.refuse_existing(run_dir)
    with EnvironmentPool(config.environment, config.line.seed) as pool:
        task = pool.check()
        observation = pool.observe(task) if pool.multi_turn else None
    path = resolve(config.model.name)
    model = read_config(path)
    refuse_unsupported(model, path)
    context = context_limit(context_length(model.get_text_config(decoder=True)), config.engine)
    tokenizer = load_tokenizer(path)
    if observation is not None:
        tokens = len(check_observation(tokenizer, observation, context))
        text = prompt_text(observation.messages)
    else:
        tokens = len(encode_task_prompt(tokenizer, task["prompt"]))
        check_prompt_length(tokens, context)
        text = prompt_text(task["prompt"])
    return DryRun(text, tokens, context, memory_estimate(config))
