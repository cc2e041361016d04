"""headrace's side of the generation rows, started as `headrace train` starts: allocator, threads, engine.

Settings: `model`, `engine` (fields of `[engine]`). It says how many weights its layers' and its head's matrices have.
A request: `prompts` (token ids), `max_tokens` (one number per prompt) and `seed`. Its answer: `tokens` drawn and
`seconds`.

Invariants
* Every sample has exactly its number of tokens: end-of-sequence ids are ignored.
* The time is from the first `submit` to the last token, with each token's log-prob.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import time
from typing import Any

import torch

from headrace.engine import Engine, random_key
from headrace.line.setup import default_threads
from headrace.state.machine import tune_allocator
from headrace.types import Sampling


def matrix_weights(engine: Engine) -> dict[str, int]:
    """Elements of the linear layers' weights: of those of every layer together, and of the head."""
    module = engine.model.module
    head = module.get_output_embeddings().weight
    linears = [m.weight for m in module.modules() if isinstance(m, torch.nn.Linear) and m.weight is not head]
    return {"layers": sum(weight.numel() for weight in linears), "head": head.numel()}


def main() -> None:
    settings = serving.settings()
    started = time.perf_counter()
    torch.set_num_threads(default_threads())
    tune_allocator()
    engine = Engine.load(settings["model"], **settings["engine"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        tokens = 0
        started = time.perf_counter()
        for i, (ids, n) in enumerate(zip(request["prompts"], request["max_tokens"], strict=True)):
            sampling = Sampling(temperature=1.0, max_tokens=n, ignore_eos=True)
            engine.submit(i, ids, sampling, random_key=random_key(request["seed"], i))
        while engine.num_unfinished:
            tokens += len(engine.step())
        return {"tokens": tokens, "seconds": time.perf_counter() - started}

    facts = {"start_s": time.perf_counter() - started, "threads": torch.get_num_threads()}
    serving.serve(facts | {"weights": matrix_weights(engine)}, answer)


if __name__ == "__main__":
    main()
