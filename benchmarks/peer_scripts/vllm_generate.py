"""vLLM's side of the generation rows, run by the Python of its own virtual environment.

Settings: `model` (folder), `dtype`, `eager`, `block_size`, `max_model_len`, `max_sequences`. A request: `prompts`
(token ids) and `max_tokens` (one number per prompt). Its answer: `tokens` drawn and `seconds`.

Invariants
* Every sample has exactly its number of tokens: end-of-sequence ids are ignored.
* The time is that of one `LLM.generate` call; loading and compiling are not in it.
* No log-probs are asked for, though RL needs them and headrace's side computes them: vLLM is faster without.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import time
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    settings = serving.settings()
    started = time.perf_counter()
    llm = LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        enforce_eager=settings["eager"],
        block_size=settings["block_size"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_sequences"],
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in request["max_tokens"]
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}

    serving.serve({"start_s": time.perf_counter() - started}, answer)


if __name__ == "__main__":
    main()
