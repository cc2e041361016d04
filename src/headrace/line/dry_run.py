"""What can be known about a run without loading weights or creating anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config
from headrace.engine.engine import DEFAULT_CONTEXT
from headrace.environments import EnvironmentPool
from headrace.errors import UserError
from headrace.line.evaluate import prompt_text
from headrace.line.setup import memory_estimate
from headrace.models import encode_task_prompt, resolve
from headrace.models.load import context_length, load_tokenizer, read_config, refuse_unsupported


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
    if run_dir is not None and Path(run_dir).exists():
        raise UserError(
            f"{run_dir} exists already: pick another --run-dir, or continue that run with --resume"
        )
    with EnvironmentPool(config.environment, config.line.seed) as pool:
        task = pool.check()
    path = resolve(config.model.name)
    model = read_config(path)
    refuse_unsupported(model, path)
    limit = context_length(model.get_text_config(decoder=True))
    context = config.engine.context_length or min(limit, DEFAULT_CONTEXT)
    if context > limit:
        raise UserError(f"engine.context_length = {context} is more than the model's {limit}")
    tokens = len(encode_task_prompt(load_tokenizer(path), task["prompt"]))
    if tokens >= context:
        raise UserError(
            f"a prompt of {tokens} tokens does not leave room for an answer in a context of {context}; "
            "shorten the prompt or raise engine.context_length"
        )
    return DryRun(prompt_text(task["prompt"]), tokens, context, memory_estimate(config))
