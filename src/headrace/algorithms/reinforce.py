"""REINFORCE with the batch's mean reward as baseline (REINFORCE++, arXiv 2501.03262)."""

from __future__ import annotations

import torch

from headrace.algorithms.advantages import group_advantages
from headrace.algorithms.base import Algorithm, Groups, Tokens, rewards_of
from headrace.algorithms.rloo import weighted_policy_gradient
from headrace.algorithms.surrogate import TokenLoss
from headrace.presets import PRESETS


class Reinforce(Algorithm):
    """A = (R − mean) / (std + 1e-4) over all samples of the step; −sg(min(π/μ, C)) A logp.

    The paper's global advantage normalisation, with plain importance weights where it has PPO's clip. A group whose
    rewards are equal has an advantage too, if other groups did better or worse. So `group_size = 1` is possible, and
    the gradient of every group waits until the step's last one is known.
    """

    presets = PRESETS["reinforce"]
    scope = "batch"

    def advantages(self, groups: Groups) -> list[list[float]]:
        everyone = torch.cat([rewards_of(group) for group in groups])
        advantages = group_advantages(everyone, self.settings.normalize_std)
        return [part.tolist() for part in torch.split(advantages, [len(group) for group in groups])]

    def loss(self, tokens: Tokens) -> TokenLoss:
        return weighted_policy_gradient(tokens, self.settings.importance_cap)
