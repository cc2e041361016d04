"""From log-probs of tokens to the sums of `measures`: how far trainer and generator are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms import LOG_RATIO_LIMIT, k3_kl
from headrace.measures import Divergence, TokenStatistics


def divergence_of(logp: Tensor, logp_behaviour: Tensor) -> Divergence:
    """How far π is from the μ that sampled T tokens, by their log-probs under both; both are [T], on the CPU.

    Ratios are those of log-ratios within ±20, so that one token cannot make the sums infinite.
    """
    if not len(logp):
        return Divergence()
    logp, logp_behaviour = logp.detach().to(torch.float64), logp_behaviour.to(torch.float64)
    difference = logp - logp_behaviour
    ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return Divergence(
        tokens=len(difference),
        difference_sum=float(difference.abs().sum()),
        difference_max=float(difference.abs().max()),
        ratio_sum=float(ratio.sum()),
        ratio_square_sum=float(ratio.square().sum()),
        k3_sum=float(k3_kl(logp_behaviour, logp).sum()),
    )


def token_statistics_of(
    logp: Tensor, logp_behaviour: Tensor, current: Tensor, clipped: Tensor, clamped: Tensor
) -> TokenStatistics:
    """Of T scored tokens, without their age; all arguments are [T], on the CPU.

    Args:
        current: true where the weights being trained sampled the token over KV of their own.
        clipped, clamped: as in `TokenStatistics`.
    """
    return TokenStatistics(
        drift=divergence_of(logp, logp_behaviour),
        mismatch=divergence_of(logp[current], logp_behaviour[current]),
        clipped=int(clipped.sum()),
        clamped=int(clamped.sum()),
    )
