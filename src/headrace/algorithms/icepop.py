"""IcePop, as in GLM-5's reasoning RL (arXiv 2602.15763): tokens on which trainer and generator disagree go."""

from __future__ import annotations

import torch

from headrace.algorithms.base import Tokens
from headrace.algorithms.grpo import GroupRelative
from headrace.algorithms.ratios import probability_ratio
from headrace.algorithms.surrogate import TokenLoss
from headrace.presets import PRESETS


class Icepop(GroupRelative):
    """−pop(ρ) r A per token: pop(ρ) = ρ = π_old/μ where 1/β ≤ ρ ≤ β, and 0 outside; r = π/π_old. No KL.

    GLM-5 clips r to (0.8, 1.28) as well. With one optimizer step per batch π_old is the policy itself, so r = 1 (with a
    gradient) and the clip never acts: its ranges are not settings here. Tokens outside the band stay in the
    denominator, as in the paper; they are counted as clipped.
    """

    presets = PRESETS["icepop"]

    def loss(self, tokens: Tokens) -> TokenLoss:
        band = self.settings.ratio_band
        rho = probability_ratio(tokens.logp.detach(), tokens.logp_behaviour)
        outside = (rho < 1 / band) | (rho > band)
        weights = torch.where(outside, 0.0, rho)
        ratio = probability_ratio(tokens.logp, tokens.logp)
        return TokenLoss(-weights * ratio * tokens.advantages, outside)
