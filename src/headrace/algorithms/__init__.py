"""Pure functions on tensors: advantages, losses, off-policy corrections, aggregation, diagnostics.

Invariant: nothing here holds state, reads a setting or knows a model; each formula names its source.
"""

from headrace.algorithms.advantages import group_advantages
from headrace.algorithms.aggregation import Aggregation, aggregate, denominator
from headrace.algorithms.corrections import truncated_importance_weights
from headrace.algorithms.diagnostics import effective_sample_size, logprob_difference, policy_kl
from headrace.algorithms.grpo import Ratio, TokenLoss, clipped_surrogate, k3_kl, token_loss

__all__ = [
    "Aggregation",
    "Ratio",
    "TokenLoss",
    "aggregate",
    "clipped_surrogate",
    "denominator",
    "effective_sample_size",
    "group_advantages",
    "k3_kl",
    "logprob_difference",
    "policy_kl",
    "token_loss",
    "truncated_importance_weights",
]
