"""RLOO (arXiv 2402.14740): REINFORCE with the other samples' mean reward as baseline."""

from __future__ import annotations

from headrace.algorithms.advantages import leave_one_out_advantages
from headrace.algorithms.base import Algorithm, Groups, Tokens, rewards_of
from headrace.algorithms.ratios import truncated_importance_weights
from headrace.algorithms.surrogate import TokenLoss
from headrace.presets import PRESETS


def weighted_policy_gradient(tokens: Tokens, cap: float) -> TokenLoss:
    """−sg(min(π/μ, C)) A logp per token: REINFORCE, with truncated importance weights for tokens of another policy.

    On policy the weight is 1. `clipped` is where it was truncated.
    """
    weights = truncated_importance_weights(tokens.logp, tokens.logp_behaviour, cap)
    return TokenLoss(-weights * tokens.advantages * tokens.logp, weights == cap)


class Rloo(Algorithm):
    """A_i = R_i − mean of the others; −sg(min(π/μ, C)) A logp, without a clip.

    The paper divides the sum over tokens by the number of sequences. The preset divides it by the number of tokens: one
    factor for the whole batch, which AdamW does not see.
    """

    presets = PRESETS["rloo"]

    def advantages(self, groups: Groups) -> list[list[float]]:
        return [leave_one_out_advantages(rewards_of(group)).tolist() for group in groups]

    def loss(self, tokens: Tokens) -> TokenLoss:
        return weighted_policy_gradient(tokens, self.settings.importance_cap)
