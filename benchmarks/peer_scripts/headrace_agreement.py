"""Samples while weights change, and compares each token's log-prob with the trainer's under the same weights.

Settings: `model`. A request: `engine` (fields of `[engine]`), `groups`, `samples` (of each), `max_tokens` (forced),
`switches` (optimizer steps on the way) and `learning_rate`. Its answer: `tokens` compared, `mean` and `max` of the
differences, `per_version` (the same by policy version), and how often what must be covered happened:
`prefix_hit_tokens`, `chunked_prompts`, `preemptions`, `switches_in_flight`.

Invariants
* A token is compared under the weights that sampled it, before they change: the trainer scores all trajectories just
  before each optimizer step, also those that are still being sampled.
* The steps are real ones, taken of answers so far; sampling goes on in the middle of them.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
from typing import Any

import torch

from headrace.algorithms import load_algorithm
from headrace.config import AlgorithmConfig, EngineConfig, TrainerConfig
from headrace.engine import Engine, random_key
from headrace.environments import load_environment
from headrace.line.setup import default_threads
from headrace.models import encode_task_prompt, load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.machine import tune_allocator
from headrace.state.weights import mint
from headrace.trainer import Trainer
from headrace.types import Sampling, Trajectory, TrajectoryId

PROMPTS = (
    "What is {a} {op} {b}? Reply with only the number.",
    "Tom has {a} apples. On his way home from the market he finds a basket, and somebody says: {a} {op} {b}. Think "
    "about what that person may have meant, explain it in a few words, and say how many apples he has in the end.",
)
"""A short prompt, and one of more tokens than a step of the engine may have."""

STEP_GROUPS = 4
"""Groups of one optimizer step."""


class Comparison:
    """An engine and a trainer on one set of weights, and what they said about each token."""

    def __init__(self, model_name: str, request: dict[str, Any]) -> None:
        self.request = request
        model = load_model(resolve(model_name), dtype="float32", device="cpu", attn_implementation=ATTENTION)
        config = EngineConfig(**request["engine"])
        self.engine = Engine(model, config)
        rate = TrainerConfig(learning_rate=request["learning_rate"])
        self.trainer = Trainer(
            model.module, load_algorithm(AlgorithmConfig()), rate, total_steps=request["switches"]
        )
        self.groups: list[list[Trajectory]] = []
        self.differences: list[list[float]] = []
        self.chunked = self.in_flight = 0

    def run(self) -> dict[str, Any]:
        self._submit()
        tokens, version = 0, 0
        wanted = self.request["groups"] * self.request["samples"] * self.request["max_tokens"]
        while self.engine.num_unfinished:
            for event in self.engine.step():
                group, sample = event.request_id  # type: ignore[misc]
                trajectory = self.groups[group][sample]
                trajectory.append_sampled(event.token_id, event.logprob, event.version)
                tokens += 1
            if version < self.request["switches"] and tokens >= (version + 1) * wanted // (
                self.request["switches"] + 1
            ):
                self._compare(version)
                version += 1
                self._switch(version)
        self._compare(version)
        return self._result()

    def _submit(self) -> None:
        sampling = Sampling(temperature=1.0, max_tokens=self.request["max_tokens"], ignore_eos=True)
        environments = [load_environment("arithmetic", {"prompt": prompt}) for prompt in PROMPTS]
        for number in range(self.request["groups"]):
            tasks = environments[number % len(environments)].tasks("train")
            ids = encode_task_prompt(self.engine.tokenizer, tasks[number]["prompt"])
            self.chunked += len(ids) > self.request["engine"]["max_batch_tokens"]
            self.groups.append([])
            for sample in range(self.request["samples"]):
                trajectory = Trajectory(TrajectoryId(number, sample, 0), sampling.temperature)
                trajectory.append_observed(ids)
                self.groups[-1].append(trajectory)
                self.engine.submit((number, sample), ids, sampling, random_key=random_key(0, number, sample))

    def _compare(self, version: int) -> None:
        """Score every token that these weights sampled."""
        chosen = [t for group in self.groups for t in group if version in t.versions]
        differences = []
        for trajectory, scored in zip(chosen, self.trainer.token_logprobs(chosen), strict=True):
            start = trajectory.prompt_length
            behaviour, versions = trajectory.logprobs[start:], trajectory.versions[start:]
            for ours, theirs, sampled_by in zip(scored, behaviour, versions, strict=True):
                if sampled_by == version:
                    differences.append(abs(ours - theirs))
        self.differences.append(differences)

    def _switch(self, version: int) -> None:
        """One optimizer step on some of the answers so far, and its weights for the engine."""
        started = [[t for t in group if t.num_sampled] for group in self.groups]
        taken = [group for group in started if len(group) > 1][:STEP_GROUPS]
        for group in taken:
            for number, trajectory in enumerate(group):
                trajectory.reward = float(number % 2)
        self.trainer.accumulate(taken, version=version - 1, max_staleness=version)
        if not self.trainer.step().updated:
            raise RuntimeError("the step changed no weights: no group had two answers yet")
        self.in_flight += self.engine.num_unfinished > 0
        self.engine.update_weights(version, mint())

    def _result(self) -> dict[str, Any]:
        everything = [difference for differences in self.differences for difference in differences]
        return {
            "tokens": len(everything),
            "mean": sum(everything) / len(everything),
            "max": max(everything),
            "per_version": [
                {"tokens": len(d), "mean": sum(d) / max(1, len(d)), "max": max(d, default=0.0)}
                for d in self.differences
            ],
            "prefix_hit_tokens": self.engine.cache.hit_tokens,
            "chunked_prompts": self.chunked,
            "preemptions": self.engine.scheduler.preemptions,
            "switches_in_flight": self.in_flight,
        }


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(default_threads())
    tune_allocator()
    serving.serve({}, lambda request: Comparison(settings["model"], request).run())


if __name__ == "__main__":
    main()
