"""GRPO (arXiv 2402.03300) with clip-higher (DAPO, arXiv 2503.14476), against the policy that sampled."""

from __future__ import annotations

from headrace.algorithms.advantages import group_advantages
from headrace.algorithms.base import Algorithm, Groups, Tokens, rewards_of
from headrace.algorithms.ratios import truncated_importance_weights
from headrace.algorithms.surrogate import TokenLoss, clipped_surrogate
from headrace.presets import PRESETS


class GroupRelative(Algorithm):
    """Advantages (R − mean) / std of each group, or R − mean if `normalize_std` is off."""

    def advantages(self, groups: Groups) -> list[list[float]]:
        normalize = self.settings.normalize_std
        return [group_advantages(rewards_of(group), normalize).tolist() for group in groups]


class Grpo(GroupRelative):
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) per token (equation 3 of the paper).

    What r is taken against is `ratio`:

    * "behaviour": the generator's log-probs. With one optimizer step per batch the policy at the start of the step is
      the policy itself, so this is what makes clipping act on stale tokens.
    * "proximal": decoupled PPO (arXiv 2505.24298). Then r = 1 (with a gradient), and each token carries the weight
      sg(min(π_old/μ, C)). It corrects for quantised rollouts.

    The paper takes the mean of each sequence first (`loss_aggregation = "sequence"`); the preset is DAPO's one token
    mean, which does not favour short wrong answers over long ones.
    """

    presets = PRESETS["grpo"]

    def loss(self, tokens: Tokens) -> TokenLoss:
        settings = self.settings
        clip = (settings.clip_low, settings.clip_high, settings.dual_clip)
        if settings.ratio == "behaviour":
            return clipped_surrogate(tokens.logp, tokens.logp_behaviour, tokens.advantages, *clip)
        loss, clipped = clipped_surrogate(tokens.logp, tokens.logp.detach(), tokens.advantages, *clip)
        weights = truncated_importance_weights(tokens.logp, tokens.logp_behaviour, settings.importance_cap)
        return TokenLoss(loss * weights, clipped)
