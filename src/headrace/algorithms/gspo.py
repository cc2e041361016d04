"""GSPO (arXiv 2507.18071): the ratio, and its clip, of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.algorithms.base import Tokens
from headrace.algorithms.grpo import GroupRelative
from headrace.algorithms.ratios import log_ratio
from headrace.algorithms.surrogate import TokenLoss, clip_ratio
from headrace.presets import PRESETS


class Gspo(GroupRelative):
    """−min(s A, clip(s, 1 − ε_low, 1 + ε_high) A), s = exp(mean_t log(π/μ)_t): equations 5 to 7.

    Each token carries the loss of its sequence, so that the mean over a sequence's tokens is the sequence's loss.

    A *sequence* is one row of a trajectory. Where a chat template rewrote history and the trajectory went on in a new
    row, each row has its own s, the mean over its own sampled tokens, and the weight of its share of the trajectory's
    tokens: the model saw other text before each row, so there is no one sequence whose likelihood could be meant.

    The ranges are the paper's (section 5.1), for several updates on one batch of a large model. Where `clipped_ratio`
    says that most stale tokens are clipped, wider ones suit.
    """

    presets = PRESETS["gspo"]

    def loss(self, tokens: Tokens) -> TokenLoss:
        ratio = sequence_mean(log_ratio(tokens.logp, tokens.logp_behaviour), tokens.sequences).exp()
        settings = self.settings
        return clip_ratio(ratio, tokens.advantages, settings.clip_low, settings.clip_high, settings.dual_clip)


def sequence_mean(values: Tensor, sequences: Tensor) -> Tensor:
    """[T], for each token the mean of `values` [T] over its sequence; `sequences` [T] are indices from 0."""
    count = int(sequences.max()) + 1
    sums = values.new_zeros(count).index_add(0, sequences, values)
    sizes = values.new_zeros(count).index_add(0, sequences, torch.ones_like(values))
    return (sums / sizes)[sequences]
