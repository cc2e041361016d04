"""What must be right before any work starts: threads, environment, model, engine, prompt, memory.

Invariant: everything that can be wrong with a user's input is found here, as one `UserError` line, before a run
folder exists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from headrace.algorithms import Algorithm, load_algorithm
from headrace.config import Config
from headrace.engine import Engine, check_prompt_length, context_limit
from headrace.engine.forward import LLAMA_SHAPED
from headrace.environments import EnvironmentPool, Observation
from headrace.errors import UserError
from headrace.models import (
    Conversation,
    LoadedModel,
    encode_task_prompt,
    kv_bytes_per_token,
    load_model,
    parameter_count,
    resolve,
)
from headrace.models.attention import ATTENTION
from headrace.models.load import context_length, read_config
from headrace.state.machine import available_cores, available_mb, tune_allocator
from headrace.state.weights import content_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class HeldOutTask(NamedTuple):
    """A test task and its prompt as token ids; in a conversation its world begins, and there is none."""

    task: dict[str, Any]
    prompt_ids: list[int]


@dataclass(slots=True)
class Workplace:
    """An environment that answers and a model that generates, checked against each other.

    Attributes:
        held_out: the test tasks to measure it with.
        skipped: test tasks that were left out since their prompts do not fit the context.
    """

    config: Config
    pool: EnvironmentPool
    model: LoadedModel
    engine: Engine
    algorithm: Algorithm
    held_out: list[HeldOutTask] = field(default_factory=list)
    skipped: int = 0

    def unquantised_engine(self) -> Engine:
        """An idle engine over the model's own weights: the generator, or a short-lived one beside quantised weights."""
        settings = self.config.engine
        if settings.weight_format == "float32":
            return self.engine
        # The generator holds KV already; what is free now must do for this one.
        free_mb = max(1, int(available_mb() / 2))
        update = {
            "weight_format": "float32",
            "kv_memory_mb": min(settings.kv_memory_mb or free_mb, free_mb),
            "kv_host_mb": 0,
            "kv_disk_mb": 0,
        }
        return Engine(self.model, settings.model_copy(update=update), self.engine.weights_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.pool.close()
        self.engine.close()


def prepare(
    config: Config,
    model_path: Path | None = None,
    output: int | None = None,
    kv_shared_name: str | None = None,
) -> Workplace:
    """Start the environment's workers, load the model, and try the first task.

    Args:
        output: descriptor for what the environment prints; standard error by default.
        model_path: a folder to load instead of `config.model.name`.
        kv_shared_name: the name of the run's host memory for KV.

    Raises:
        UserError: one line about what is wrong.
    """
    algorithm = load_algorithm(config.algorithm)
    pool = EnvironmentPool(config.environment, config.line.seed, output)
    try:
        # The environment first: it is quick to check, and its mistakes are the commonest.
        pool.start()
        first_task = pool.check(test_tasks=config.eval.tasks)
        set_threads(config)
        tune_allocator()
        model = load_model(
            model_path or resolve(config.model.name),
            dtype=config.model.dtype,
            device=config.model.device,
            attn_implementation=ATTENTION,
        )
        engine = Engine(model, config.engine, content_digest(model.module), kv_shared_name=kv_shared_name)
        tasks = pool.test_tasks(config.eval.tasks)
        if pool.multi_turn:
            check_observation(engine.tokenizer, pool.observe(first_task), engine.context_length)
            held_out, skipped = [HeldOutTask(task, []) for task in tasks], 0
        else:
            check_prompt(engine.tokenizer, engine.context_length, first_task)
            held_out, skipped = _held_out(engine.tokenizer, engine.context_length, tasks)
        return Workplace(config, pool, model, engine, algorithm, held_out, skipped)
    except BaseException:
        pool.close()
        raise


def set_threads(config: Config) -> int:
    """Use the threads that the settings ask for, or every core this process may run on."""
    threads = config.line.threads or default_threads()
    torch.set_num_threads(threads)
    return threads


def default_threads() -> int:
    """`OMP_NUM_THREADS`, or the cores this process may use, whichever is less."""
    cores = available_cores()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdecimal() and int(wanted) > 0 else cores


def check_prompt(tokenizer: PreTrainedTokenizerBase, context_length: int, task: dict[str, Any]) -> list[int]:
    """A task's prompt as token ids.

    Raises:
        UserError: it leaves no room for an answer.
    """
    ids = encode_task_prompt(tokenizer, task["prompt"])
    check_prompt_length(len(ids), context_length)
    return ids


def _held_out(
    tokenizer: PreTrainedTokenizerBase, context_length: int, tasks: list[dict[str, Any]]
) -> tuple[list[HeldOutTask], int]:
    """The test tasks whose prompts fit the context, and the number of those that do not."""
    fitting = []
    for task in tasks:
        try:
            fitting.append(HeldOutTask(task, check_prompt(tokenizer, context_length, task)))
        except UserError:
            continue
    return fitting, len(tasks) - len(fitting)


def check_observation(
    tokenizer: PreTrainedTokenizerBase, observation: Observation, context_length: int
) -> list[int]:
    """An episode's first observation as token ids.

    Raises:
        UserError: it cannot be rendered, or leaves no room for an answer.
    """
    ids = Conversation(tokenizer, observation.messages, observation.tools).prompt_ids
    check_prompt_length(len(ids), context_length)
    return ids


def memory_estimate(config: Config) -> dict[str, float]:
    """What a run will roughly take, in MB, without loading weights."""
    path = resolve(config.model.name)
    itemsize = 8 if config.model.dtype == "float64" else 4
    parameters = parameter_count(path) * itemsize / 2**20
    copies = {"weights": parameters, "gradients": parameters, "optimizer moments": 2 * parameters}
    quantised = config.engine.weight_format == "int8"
    if quantised:
        copies["int8 weights"] = parameters / itemsize
    if config.engine.prepack and config.model.device == "cpu" and config.model.dtype == "float32":
        if not quantised:
            copies["prepacked weights"] = parameters
        elif config.eval.tasks:
            copies["weights for evaluation"] = parameters
    if config.algorithm.kl_coef > 0:
        copies["reference model"] = parameters
    model_config = read_config(path)
    # Quantised rollouts keep the KV of the architectures that have kernels of their own as bfloat16.
    halved = quantised and set(model_config.architectures or ()) & set(LLAMA_SHAPED)
    per_token = kv_bytes_per_token(model_config, "bfloat16" if halved else config.model.dtype) / 2**20
    model_limit = context_length(model_config.get_text_config(decoder=True))
    tokens = config.engine.max_sequences * context_limit(model_limit, config.engine)
    kv = tokens * per_token
    if config.engine.kv_memory_mb is not None:
        kv = min(kv, config.engine.kv_memory_mb)
    copies["KV, at most"] = min(kv, available_mb() / 2)
    copies["prefix cache, at most"] = config.engine.prefix_cache_mb
    if config.engine.kv_host_mb:
        copies["KV in host memory, at most"] = config.engine.kv_host_mb
    copies["total"] = sum(copies.values())
    copies["available"] = available_mb()
    return copies
