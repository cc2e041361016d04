"""How far the int8 policy is from the float32 one: samples from the one, scores with the other.

Settings: `model`, `engine` (fields of `[engine]`). A request: `sources` (a list of prompts by name; each prompt is
text that becomes a chat), `samples` (of each prompt), `max_tokens`, `tokens` (at least so many are sampled, in as many
rounds as it takes). Its answer: `all` and, by name, `sources`, each with `tokens`, `ess` of the ratio float32/int8 per
token, `kl` (k3 estimate of KL(int8 || float32)), `difference_mean` and `ratio_max`.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms import effective_sample_size, load_algorithm, policy_kl
from headrace.config import AlgorithmConfig, EngineConfig, TrainerConfig
from headrace.engine import Engine
from headrace.line.setup import default_threads
from headrace.models import load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.machine import tune_allocator
from headrace.trainer import Trainer
from headrace.types import Sampling, Trajectory, TrajectoryId

ROUNDS = 20
"""At most; more would mean that the answers are far shorter than expected."""


class Mismatch:
    """An engine in one format and a trainer in float32 on the same weights."""

    def __init__(self, settings: dict[str, Any]) -> None:
        model = load_model(
            resolve(settings["model"]), dtype="float32", device="cpu", attn_implementation=ATTENTION
        )
        self.engine = Engine(model, EngineConfig(**settings["engine"]))
        self.trainer = Trainer(
            model.module, load_algorithm(AlgorithmConfig()), TrainerConfig(), total_steps=1
        )

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Rounds of all prompts until there are enough tokens."""
        ours: dict[str, list[float]] = defaultdict(list)
        theirs: dict[str, list[float]] = defaultdict(list)
        for number in range(ROUNDS):
            self._round(request, number, ours, theirs)
            if sum(map(len, ours.values())) >= request["tokens"]:
                break
        else:
            raise RuntimeError(f"{ROUNDS} rounds gave {sum(map(len, ours.values()))} tokens")
        return {
            "all": compared(list(chain(*ours.values())), list(chain(*theirs.values()))),
            "sources": {name: compared(ours[name], theirs[name]) for name in ours},
        }

    def _round(
        self,
        request: dict[str, Any],
        number: int,
        ours: dict[str, list[float]],
        theirs: dict[str, list[float]],
    ) -> None:
        sampling = Sampling(
            temperature=1.0, max_tokens=request["max_tokens"], n=request["samples"], seed=number
        )
        asked = [(name, prompt) for name, prompts in request["sources"].items() for prompt in prompts]
        outputs = self.engine.generate(
            [[{"role": "user", "content": prompt}] for _, prompt in asked], sampling
        )
        for index, ((name, _), output) in enumerate(zip(asked, outputs, strict=True)):
            group = []
            for place, sample in enumerate(output.samples):
                trajectory = Trajectory(TrajectoryId(index, place, 0), sampling.temperature)
                trajectory.append_observed(output.prompt_ids)
                for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
                    trajectory.append_sampled(token, logprob, version=0)
                group.append(trajectory)
                theirs[name] += sample.logprobs
            ours[name] += chain(*self.trainer.token_logprobs(group))


def compared(trainer: list[float], generator: list[float]) -> dict[str, Any]:
    """Measures over tokens, from both log-probs of each."""
    new = torch.tensor(trainer, dtype=torch.float64)
    behaviour: Tensor = torch.tensor(generator, dtype=torch.float64)
    return {
        "tokens": len(new),
        "ess": effective_sample_size(new, behaviour).item(),
        "kl": policy_kl(new, behaviour).item(),
        "difference_mean": (new - behaviour).abs().mean().item(),
        "ratio_max": (new - behaviour).max().exp().item(),
    }


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(default_threads())
    tune_allocator()
    serving.serve({}, Mismatch(settings).measure)


if __name__ == "__main__":
    main()
