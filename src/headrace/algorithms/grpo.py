"""GRPO's loss per token (arXiv 2402.03300) with clip-higher (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headrace.algorithms.corrections import truncated_importance_weights

Ratio = Literal["behaviour", "proximal"]


class TokenLoss(NamedTuple):
    """`loss` [T], to minimise; `clipped` [T], true where clipping removed the surrogate's gradient."""

    loss: Tensor
    clipped: Tensor


def clipped_surrogate(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(logp − logp_old).

    PPO's surrogate (arXiv 1707.06347, equation 7) per token, with the two ranges of DAPO (arXiv 2503.14476,
    equation 10).

    Args:
        logp: [T], log-probs under the policy being trained.
        logp_old: [T], log-probs under the policy that the ratio is taken against; no gradient flows into it.
        advantages: [T], each token's advantage.
    """
    ratio = (logp - logp_old.detach()).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
    return TokenLoss(-surrogate, clipped)


def k3_kl(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from samples of π: exp(d) − d − 1, d = logp_ref − logp. [T], ≥ 0.

    Schulman's k3 estimator, as in GRPO (arXiv 2402.03300, equation 4).
    """
    difference = logp_ref - logp
    return torch.expm1(difference) - difference


def token_loss(
    logp: Tensor,
    logp_behaviour: Tensor,
    advantages: Tensor,
    *,
    ratio: Ratio,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    kl_coef: float = 0.0,
    logp_ref: Tensor | None = None,
) -> TokenLoss:
    """The loss of each token with the ratio that the settings ask for, plus β·k3 when there is a reference.

    * `ratio = "behaviour"`: the surrogate against the generator's log-probs.
    * `ratio = "proximal"`: decoupled PPO (arXiv 2505.24298). With one optimizer step per batch the policy at
      the start of the step is the policy itself: its ratio is 1 (with a gradient) and each token carries the
      weight sg(min(π_old/μ, C)).

    The KL term (β times `k3_kl`) is not weighted.

    Args:
        logp, logp_behaviour, advantages, logp_ref: [T]; `logp_ref` is required when `kl_coef` is above 0.
    """
    if ratio == "behaviour":
        loss, clipped = clipped_surrogate(logp, logp_behaviour, advantages, clip_low, clip_high)
    else:
        loss, clipped = clipped_surrogate(logp, logp.detach(), advantages, clip_low, clip_high)
        loss = loss * truncated_importance_weights(logp.detach(), logp_behaviour, importance_cap)
    if kl_coef > 0:
        if logp_ref is None:
            raise ValueError("a KL term needs the reference's log-probs")
        loss = loss + kl_coef * k3_kl(logp, logp_ref)
    return TokenLoss(loss, clipped)
