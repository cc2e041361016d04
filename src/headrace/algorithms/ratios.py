"""Ratios of two policies' probabilities of a token, and what is made of them.

Invariant: no exponential is taken of a log-ratio beyond ±20. In float32 e^89 is infinite and makes gradients NaN; and
at e^20, five hundred million times the probability, the size of a ratio says nothing any more. A clamped ratio is a
constant, so its token has no gradient through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this."""


def log_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """log(π/π_old) within ±20; gradients flow into both. Any one shape, such as [T]."""
    return (logp - logp_old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def probability_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """r = π/π_old with the log-ratio within ±20; no gradient flows into `logp_old`."""
    return log_ratio(logp, logp_old.detach()).exp()


def is_clamped(logp: Tensor, logp_old: Tensor) -> Tensor:
    """Where `log_ratio` clamps. Bool, of the same shape."""
    return (logp - logp_old).detach().abs() > LOG_RATIO_LIMIT


def k3_kl(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from samples of π: exp(d) − d − 1, d = logp_ref − logp. [T], ≥ 0.

    Schulman's k3 estimator, as in GRPO (arXiv 2402.03300, equation 4), with d within ±20.
    """
    difference = log_ratio(logp_ref, logp)
    return torch.expm1(difference) - difference


def truncated_importance_weights(logp_old: Tensor, logp_behaviour: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance weights, sg(min(π_old / μ, C)).

    IMPALA's truncation (arXiv 1802.01561) on the token, as in decoupled PPO (AReaL, arXiv 2505.24298).

    Args:
        logp_old: [T], the trainer's log-probs at the start of the step.
        logp_behaviour: [T], the log-probs that the generator reported.
        cap: C.

    Returns:
        [T], detached.
    """
    return probability_ratio(logp_old.detach(), logp_behaviour).clamp(max=cap)
