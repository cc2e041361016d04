"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, no token is dropped."""

from __future__ import annotations

from headrace.algorithms.base import Tokens
from headrace.algorithms.grpo import GroupRelative
from headrace.algorithms.ratios import truncated_importance_weights
from headrace.algorithms.surrogate import TokenLoss
from headrace.presets import PRESETS


class Cispo(GroupRelative):
    """−sg(min(π/μ, 1 + ε_high)) A logp, one token mean (equations 4 and 5).

    A token whose probability has changed much keeps its gradient, with a bounded weight. There is no lower bound, as in
    the paper, which does not give its ε_high; 4 makes the cap 5, one of those that ScaleRL (arXiv 2510.13786) compares
    and finds to matter little. `clipped` is where the weight was capped.
    """

    presets = PRESETS["cispo"]

    def loss(self, tokens: Tokens) -> TokenLoss:
        cap = 1 + self.settings.clip_high
        weights = truncated_importance_weights(tokens.logp, tokens.logp_behaviour, cap)
        return TokenLoss(-weights * tokens.advantages * tokens.logp, weights == cap)
