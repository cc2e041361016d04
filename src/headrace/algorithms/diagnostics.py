"""How far the policy being trained is from the one that sampled."""

from __future__ import annotations

from torch import Tensor

from headrace.algorithms.ratios import k3_kl


def effective_sample_size(logp_new: Tensor, logp_behaviour: Tensor) -> Tensor:
    """ESS/N = (Σρ)² / (N Σρ²), ρ = π_new/μ per token: 1 when the policies agree, 1/N when one token has all
    weight.

    Kish's effective sample size as a share.

    Args:
        logp_new, logp_behaviour: [N], N ≥ 1.
    """
    difference = logp_new - logp_behaviour
    # The measure does not change when all ρ are scaled, so the largest is made 1 and nothing overflows.
    weights = (difference - difference.max()).exp()
    return weights.sum().square() / (weights.numel() * weights.square().sum())


def policy_kl(logp_new: Tensor, logp_behaviour: Tensor) -> Tensor:
    """Mean k3 estimate of KL(μ ‖ π_new) over tokens that μ sampled. Scalar, ≥ 0."""
    return k3_kl(logp_behaviour, logp_new).mean()


def logprob_difference(logp_new: Tensor, logp_behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and largest |logp_new − logp_behaviour|. Two scalars."""
    difference = (logp_new - logp_behaviour).abs()
    return difference.mean(), difference.max()
