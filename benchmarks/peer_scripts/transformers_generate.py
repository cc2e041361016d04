"""transformers' side of the generation rows: `generate` on one batch.

Settings: `model` (folder), `threads`. A request: `prompts` (token ids, all of one length) and `max_tokens` (the same
for all). Its answer: `tokens` drawn and `seconds`.

Invariant: every sample has exactly its number of tokens: end-of-sequence ids cannot be drawn before.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(settings["threads"])
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()

    @torch.inference_mode()
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(request["prompts"])
        new = request["max_tokens"][0]
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        return {"tokens": output[:, ids.shape[1] :].numel(), "seconds": seconds}

    serving.serve({"start_s": time.perf_counter() - started}, answer)


if __name__ == "__main__":
    main()
