"""Advantages of samples from their rewards."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not give huge advantages."""


def group_advantages(rewards: Tensor, normalize_std: bool) -> Tensor:
    """Group-relative advantages: (R − mean) / (std + 1e-4), or R − mean without normalisation.

    With normalisation this is GRPO (arXiv 2402.03300, section 4.1.2). The paper does not say which standard
    deviation is meant; this is the unbiased one (divisor G − 1) with 1e-4 added, as in TRL, so that learning
    rates carry over. Without it this is Dr.GRPO's advantage (arXiv 2503.20783).

    Args:
        rewards: [G], floating point.
        normalize_std: divide by the group's standard deviation.

    Returns:
        [G]. Exactly 0 where all rewards are equal, and for a group of one.
    """
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(correction=1) + STD_EPSILON) if normalize_std else centred


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """R_i − the mean of the other rewards (RLOO, arXiv 2402.14740, equation 9).

    Args:
        rewards: [G], floating point.

    Returns:
        [G]. Exactly 0 where all rewards are equal, and for a group of one, which has no others.
    """
    if _all_equal(rewards):
        return torch.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def _all_equal(rewards: Tensor) -> bool:
    # Compared, not computed: the mean of equal floats may differ from them in the last bit.
    return bool((rewards == rewards[0]).all())
