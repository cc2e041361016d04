"""DAPO (arXiv 2503.14476): clip-higher, one token mean, dynamic sampling."""

from __future__ import annotations

from headrace.algorithms.grpo import Grpo
from headrace.presets import PRESETS


class Dapo(Grpo):
    """GRPO's loss (equation 8: ε_low 0.2, ε_high 0.28, 1/Σ|y| ΣΣ, no KL), and groups whose samples all did equally well
    are replaced by others (`zero_advantage = "replace"`, equation 11).

    The paper's filter of overlong answers is `mask_truncated = true`; its soft length penalty belongs into the reward.
    """

    presets = PRESETS["dapo"]
