"""headrace's side of the training rows: samples GRPO groups, then takes their gradient, timed or profiled.

Settings: `config` (a settings file) and `overrides`. Requests, by `do`:

* "sample": `shape` (a name), `max_tokens`, `forced` (go on after the end of sequence). One group per task of a step
  is sampled and kept. Its answer: `groups`, each sample with `prompt`, `completion`, `logprobs` and `advantage`.
* "gradient": `shape`. Its answer: `seconds` of one `Trainer.accumulate` over the groups, `loss_sum` and `norm` of the
  sums it left.
* "profile": `shape`. The same under torch's profiler: `seconds`, `flops` and `linear_s` of the linear layers,
  `breakdown`, seconds by kind of work, and `others`, seconds of the operations that no other kind claims.

Invariants
* Rewards alternate within a group, so that every group has advantages and every sample a gradient.
* Allocator, threads, engine and trainer are made as `headrace train` makes them.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headrace import kernels
from headrace.algorithms import group_advantages, load_algorithm
from headrace.config import Config
from headrace.engine import Engine
from headrace.environments import load_environment
from headrace.environments.task_stream import TaskStream
from headrace.line.setup import set_threads
from headrace.models import encode_task_prompt, load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.machine import tune_allocator
from headrace.trainer import Trainer, pack
from headrace.types import Sampling, Trajectory, TrajectoryId

PRODUCTS = {
    "mkldnn::_linear_pointwise": (0, 1, True),
    "aten::linear": (0, 1, True),
    "aten::mm": (0, 1, False),
    "aten::addmm": (1, 2, False),
    "aten::addmm_": (1, 2, False),
}
"""Matrix products of linear layers: which arguments are multiplied, and whether the second is [N, K] (else [K, N])."""

NATIVE = "headrace::weight_gradient"
"""Name under which the profile shows headrace's own product, which is no operation of torch's."""

SEEN = 0.9
"""Of the products that a gradient needs, the profiler must have seen this share, or the row would be wrong."""


OTHERS = 12
"""Operations that are named one by one."""


class Bench:
    """A model that samples and trains, and the groups that it sampled."""

    def __init__(self, config: Config) -> None:
        self.config = config
        set_threads(config)
        tune_allocator()
        model = load_model(
            resolve(config.model.name),
            dtype=config.model.dtype,
            device=config.model.device,
            attn_implementation=ATTENTION,
        )
        self.module = model.module
        self.engine = Engine(model, config.engine)
        self.trainer = Trainer(model.module, load_algorithm(config.algorithm), config.trainer, total_steps=1)
        self.groups: dict[str, list[list[Trajectory]]] = {}

    def sample(self, shape: str, max_tokens: int, forced: bool) -> dict[str, Any]:
        line, size = self.config.line, self.config.algorithm.group_size
        environment = load_environment(self.config.environment.name, self.config.environment.options)
        tasks = TaskStream(environment, "train", line.seed)
        prompts = [
            encode_task_prompt(self.engine.tokenizer, tasks.get(i)["prompt"])
            for i in range(line.groups_per_step)
        ]
        temperature = self.config.sampling.temperature
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens, n=size, ignore_eos=forced)
        groups: list[list[Trajectory]] = []
        for output in self.engine.generate(prompts, sampling):
            groups.append([])
            for number, sample in enumerate(output.samples):
                trajectory = Trajectory(TrajectoryId(len(groups) - 1, number, 0), temperature)
                trajectory.append_observed(output.prompt_ids)
                for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
                    trajectory.append_sampled(token, logprob, version=0)
                trajectory.finish_reason, trajectory.reward = sample.finish_reason, float(number % 2)
                groups[-1].append(trajectory)
        self.groups[shape] = groups
        return {"groups": [self._described(group) for group in groups]}

    def gradient(self, shape: str) -> dict[str, Any]:
        started = time.perf_counter()
        result = self.trainer.accumulate(self.groups[shape], version=0, max_staleness=0)
        seconds = time.perf_counter() - started
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        self.trainer.reset()
        return {"seconds": seconds, "loss_sum": result.loss_sum, "norm": norm}

    def profile(self, shape: str) -> dict[str, Any]:
        native: list[int] = []
        with (
            _recorded_weight_gradients(native),
            profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        ):
            taken = self.gradient(shape)
        seconds, events = taken["seconds"], profiler.events()
        breakdown = attribute(events)
        flops = sum(native) + sum(
            product_flops(event.name, event.input_shapes)
            for event in events
            if event.name in PRODUCTS and kind(event.cpu_parent) != "linear layers"
        )
        if flops < SEEN * self._needed_flops(shape):
            raise RuntimeError(
                f"the profiler saw {flops / self._needed_flops(shape):.0%} of the linear layers' work; "
                "PRODUCTS must name the operations that do it"
            )
        breakdown["Python and autograd"] = max(0.0, seconds - sum(breakdown.values()))
        return {
            "seconds": seconds,
            "flops": flops,
            "linear_s": breakdown["linear layers"],
            "breakdown": breakdown,
            "others": slowest_others(events),
        }

    def _needed_flops(self, shape: str) -> int:
        """2·M·K·N for each linear layer's forward, dX and dW over the packed rows; the head's over its own."""
        head = self.module.get_output_embeddings().weight
        layers = sum(
            layer.weight.numel()
            for layer in self.module.modules()
            if isinstance(layer, torch.nn.Linear) and layer.weight is not head
        )
        batches = pack(self.groups[shape], self.config.trainer.micro_batch_tokens)
        tokens = sum(batch.input_ids.numel() for batch in batches)
        rows = sum(batch.logit_positions.numel() for batch in batches)
        return 6 * (tokens * layers + rows * head.numel())

    def _described(self, group: Sequence[Trajectory]) -> list[dict[str, Any]]:
        rewards = torch.tensor([t.reward for t in group], dtype=torch.float64)
        advantages = group_advantages(rewards, self.config.algorithm.normalize_std).tolist()
        return [
            {
                "prompt": t.token_ids[: t.prompt_length],
                "completion": t.token_ids[t.prompt_length :],
                "logprobs": t.logprobs[t.prompt_length :],
                "advantage": advantage,
            }
            for t, advantage in zip(group, advantages, strict=True)
        ]


@contextmanager
def _recorded_weight_gradients(flops: list[int]) -> Iterator[None]:
    """Show headrace's own product to the profiler inside the block; its operations are appended to `flops`."""
    original = kernels.weight_gradient

    def recorded(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        flops.append(2 * gradient.numel() * x.shape[1])
        with record_function(NATIVE):
            return original(gradient, x)

    kernels.weight_gradient = recorded
    try:
        yield
    finally:
        kernels.weight_gradient = original


def attribute(events: Sequence[Any]) -> dict[str, float]:
    """Seconds by kind of work: each event's own time goes to the nearest event of a known kind around it."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        found[kind(event) or "other operations"] += event.self_cpu_time_total / 1e6
    return dict(found)


def slowest_others(events: Sequence[Any]) -> dict[str, float]:
    """Seconds of the slowest operations of no known kind, the slowest first."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        if kind(event) is None:
            found[event.name] += event.self_cpu_time_total / 1e6
    return dict(sorted(found.items(), key=lambda item: -item[1])[:OTHERS])


def kind(event: Any) -> str | None:
    """The kind of work that an event, or the nearest known one around it, belongs to."""
    while event is not None:
        name = event.name.lower()
        if event.name in PRODUCTS or event.name == NATIVE:
            return "linear layers"
        if "packedattention" in name or "scaled_dot_product" in name or "flash_attention" in name:
            return "attention"
        if "logprob" in name or "logsumexp" in name or "log_softmax" in name:
            return "log-probs"
        event = event.cpu_parent
    return None


def product_flops(name: str, shapes: Sequence[Sequence[int]]) -> int:
    """2·M·K·N of one product, from the shapes of its arguments."""
    left, right, transposed = PRODUCTS[name]
    rows = 1
    for size in shapes[left]:
        rows *= size
    return 2 * rows * shapes[right][0 if transposed else 1]


def main() -> None:
    settings = serving.settings()
    bench = Bench(Config.load(settings["config"], settings["overrides"]))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        action = request.pop("do")
        return {"sample": bench.sample, "gradient": bench.gradient, "profile": bench.profile}[action](
            **request
        )

    serving.serve({"threads": torch.get_num_threads()}, answer)


if __name__ == "__main__":
    main()
