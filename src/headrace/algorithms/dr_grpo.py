"""Dr.GRPO (arXiv 2503.20783): GRPO without its two biases."""

from __future__ import annotations

from headrace.algorithms.grpo import Grpo
from headrace.presets import PRESETS


class DrGrpo(Grpo):
    """GRPO's loss with A = R − mean, and sums over sequences divided by one constant length L_max.

    GRPO's division by the standard deviation gives tasks that are nearly solved or nearly hopeless more weight, and its
    division by |y| makes long wrong answers cheap; the paper drops both (section 3). ε is 0.2 on both sides, as in its
    code.
    """

    presets = PRESETS["dr_grpo"]
