"""transformers' side of the training rows: forward and backward of the same trajectories, padded.

Settings: `model` (folder), `threads`, `temperature`, `clip_low`, `clip_high`. A request: `samples` (each with `prompt`,
`completion`, `logprobs`, `advantage`) and `micro_batch` (samples per forward and backward). Its answer: `seconds`,
and `loss_sum` and `norm` of the sums, which must be headrace's.

Invariants
* Prompts are padded on the left and completions on the right to the longest of all samples, as TRL pads a step.
* Logits are computed at the completions' places only, the log-softmax at the sampled ids only; nothing is
  recomputed in the backward.
"""

from __future__ import annotations

import serving  # first: it takes standard output

# isort: split
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def padded(rows: Sequence[Sequence[float]], *, left: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, longest] and the mask of what is not padding."""
    width = max(map(len, rows))
    values, mask = torch.zeros(len(rows), width, dtype=dtype), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        values[index, place] = torch.tensor(row, dtype=dtype)
        mask[index, place] = 1
    return values, mask


def main() -> None:
    settings = serving.settings()
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]

    def loss_sum(ids: Tensor, mask: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        """The clipped surrogate, summed over the completions' tokens."""
        length = old.shape[1]
        output = model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False)
        logits = output.logits[:, :-1] / settings["temperature"]
        chosen = logits.gather(-1, ids[:, -length:].unsqueeze(-1)).squeeze(-1)
        ratio = (chosen - torch.logsumexp(logits, dim=-1) - old).exp()
        advantages = advantages.unsqueeze(-1)
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        return (losses * mask[:, -length:]).sum()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        samples, total = request["samples"], 0.0
        started = time.perf_counter()
        prompts, prompt_mask = padded([s["prompt"] for s in samples], left=True, dtype=torch.long)
        completions, completion_mask = padded(
            [s["completion"] for s in samples], left=False, dtype=torch.long
        )
        old, _ = padded([s["logprobs"] for s in samples], left=False, dtype=torch.float32)
        advantages = torch.tensor([s["advantage"] for s in samples], dtype=torch.float32)
        ids = torch.cat([prompts, completions], dim=1)
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        for part in torch.arange(len(samples)).split(request["micro_batch"]):
            loss = loss_sum(ids[part], mask[part], old[part], advantages[part])
            loss.backward()
            total += loss.item()
        seconds = time.perf_counter() - started
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        ).item()
        model.zero_grad(set_to_none=True)
        return {"seconds": seconds, "loss_sum": total, "norm": norm}

    serving.serve({}, answer)


if __name__ == "__main__":
    main()
