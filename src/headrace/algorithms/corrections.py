"""Weights that correct for tokens sampled by another policy than the one being improved."""

from __future__ import annotations

from torch import Tensor


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
    return (logp_old - logp_behaviour).detach().exp().clamp(max=cap)
