"""Double-sided importance sampling, GLM-5's agent RL (arXiv 2602.15763)."""

from __future__ import annotations

import torch

from headrace.algorithms.base import Tokens
from headrace.algorithms.grpo import GroupRelative
from headrace.algorithms.ratios import probability_ratio
from headrace.algorithms.surrogate import TokenLoss
from headrace.presets import PRESETS


class Dsis(GroupRelative):
    """−sg(f(r)) A logp, one token mean; r = π/μ, f(r) = r where 1 − ε_low < r < 1 + ε_high, and 0 outside.

    Made for long episodes whose tokens come from several old policies: only the generator's own log-probs are needed,
    and tokens that have drifted either way leave the gradient, whatever their advantage; they are counted as clipped.
    The ranges are those of the paper's reasoning RL.
    """

    presets = PRESETS["dsis"]

    def loss(self, tokens: Tokens) -> TokenLoss:
        settings = self.settings
        ratio = probability_ratio(tokens.logp.detach(), tokens.logp_behaviour)
        inside = (ratio > 1 - settings.clip_low) & (ratio < 1 + settings.clip_high)
        weights = torch.where(inside, ratio, 0.0)
        return TokenLoss(-weights * tokens.advantages * tokens.logp, ~inside)
