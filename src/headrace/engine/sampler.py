"""From logits to tokens, log-probs included.

Invariants
* A token's randomness is a pure function of its sequence's key and its position: it does not depend on what
  shares the batch, nor on the order in which sequences are drawn.
* The log-prob is log-softmax(logits / temperature) at the drawn id, before any top-k or top-p cut; a greedy
  draw (temperature 0) reports it at temperature 1.
* A token of probability zero is never drawn.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headrace import kernels

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ONE_BELOW = {torch.float32: 1.0 - 2.0**-24, torch.float64: 1.0 - 2.0**-53}


def random_key(*parts: int | str | bytes) -> int:
    """A 64-bit key for one sequence's randomness, from what identifies it (run seed, group, sample, attempt)."""
    text = "\x1f".join(part.hex() if isinstance(part, bytes) else str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(key: int, position: int) -> float:
    """A uniform number in [0, 1) for a position: the SplitMix64 finaliser over a counter (Steele et al. 2014)."""
    z = (key + (position + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def sample(
    logits: Tensor, temperatures: list[float], top_ks: list[int], top_ps: list[float], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: [R, V], overwritten.
        temperatures, top_ks, top_ps, uniforms: one per row.

    Returns:
        The ids and their log-probs. A row whose logits hold NaN or +inf has a log-prob that is not finite.
    """
    cuts = any(top_ks) or any(p < 1 for p in top_ps)
    if not cuts and logits.is_contiguous() and kernels.suits(logits):
        return kernels.draw(logits, temperatures, uniforms)
    if logits.dtype not in _ONE_BELOW:
        logits = logits.float()
    peaks, greedy_ids = logits.max(dim=-1)
    # Relative to the peak first: a tiny temperature then makes the rest -inf, and never inf - inf.
    logits = logits.sub_(peaks.unsqueeze(-1))
    divisors = [t if t > 0 else 1.0 for t in temperatures]
    if any(d != 1.0 for d in divisors):
        smallest = torch.finfo(logits.dtype).tiny
        logits = logits.div_(logits.new_tensor(divisors).clamp_(min=smallest).unsqueeze(-1))
    ids = greedy_ids.clone()
    drawn = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    weights = torch.exp(logits)
    totals = weights.sum(dim=-1)
    if drawn:
        cut = [row for row in drawn if top_ks[row] > 0 or top_ps[row] < 1]
        kept = _cut(weights, cut, top_ks, top_ps) if cut else weights
        rows = kept if len(drawn) == len(temperatures) else kept[drawn]
        cumulative = torch.cumsum(rows, dim=-1)
        below = torch.tensor([uniforms[row] for row in drawn], dtype=rows.dtype, device=rows.device)
        target = below.clamp_(max=_ONE_BELOW[rows.dtype]).unsqueeze(-1) * cumulative[:, -1:]
        picks = torch.searchsorted(cumulative, target, right=True)
        # Rounding can lift the target onto the total; the last token with weight is then the right one.
        last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
        # Where the logits are not finite both point past the end; the log-prob then tells the caller.
        ids[drawn] = torch.minimum(picks, last).clamp_(max=rows.shape[-1] - 1).squeeze(-1)
    chosen = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    logprobs = chosen - torch.log(totals)
    return ids.tolist(), logprobs.tolist()


def _cut(weights: Tensor, rows: list[int], top_ks: list[int], top_ps: list[float]) -> Tensor:
    """`weights` with everything outside top-k, then top-p, set to zero in the given rows."""
    weights = weights.clone()
    ordered, order = weights[rows].sort(dim=-1, descending=True, stable=True)
    vocabulary = weights.shape[-1]
    ks = torch.tensor([top_ks[row] or vocabulary for row in rows], device=weights.device).unsqueeze(-1)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=weights.device) >= ks, 0.0)
    before = torch.cumsum(ordered, dim=-1) - ordered
    ps = ordered.new_tensor([top_ps[row] for row in rows]).unsqueeze(-1)
    ordered = ordered.masked_fill((before >= ps * ordered.sum(dim=-1, keepdim=True)) & (before > 0), 0.0)
    weights[rows] = torch.zeros_like(ordered).scatter_(-1, order, ordered)
    return weights
