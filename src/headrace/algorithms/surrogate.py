"""The clipped surrogate of PPO, with two ranges and the dual clip."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.algorithms.ratios import probability_ratio


class TokenLoss(NamedTuple):
    """`loss` [T], to minimise; `clipped` [T], true where clipping changed it (and is counted)."""

    loss: Tensor
    clipped: Tensor


def clipped_surrogate(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(logp − logp_old).

    PPO's surrogate (arXiv 1707.06347, equation 7) per token, with the two ranges of DAPO (arXiv 2503.14476,
    equation 10).

    Args:
        logp: [T], log-probs under the policy being trained.
        logp_old: [T], log-probs under the policy that the ratio is taken against; no gradient flows into it.
        advantages: [T], each token's advantage.
        dual_clip: c > 1; where A < 0 the surrogate is max(min(…), c A) (arXiv 1912.09729, equation 5).
    """
    return clip_ratio(probability_ratio(logp, logp_old), advantages, clip_low, clip_high, dual_clip)


def clip_ratio(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """`clipped_surrogate` of given ratios [T]; `clipped` is where it removed the gradient."""
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    if dual_clip is not None:
        negative = advantages < 0
        surrogate = torch.where(negative, torch.maximum(surrogate, dual_clip * advantages), surrogate)
        clipped = clipped | (negative & (ratio > dual_clip))
    return TokenLoss(-surrogate, clipped)
