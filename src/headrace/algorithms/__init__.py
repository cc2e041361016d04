"""Algorithms as objects: advantages, a loss per token and its normaliser; one idea per file.

Invariant: nothing here knows a model, and nothing holds state that changes; each formula names its source.
"""

from headrace.algorithms.advantages import group_advantages, leave_one_out_advantages
from headrace.algorithms.aggregation import Aggregation, aggregate, denominator
from headrace.algorithms.base import Algorithm, Groups, Scope, Tokens, rewards_of
from headrace.algorithms.diagnostics import effective_sample_size, logprob_difference, policy_kl
from headrace.algorithms.load import BUILT_IN, algorithm_file, load_algorithm
from headrace.algorithms.ratios import (
    LOG_RATIO_LIMIT,
    is_clamped,
    k3_kl,
    log_ratio,
    probability_ratio,
    truncated_importance_weights,
)
from headrace.algorithms.surrogate import TokenLoss, clip_ratio, clipped_surrogate
from headrace.measures import SampleFacts

__all__ = [
    "BUILT_IN",
    "LOG_RATIO_LIMIT",
    "Aggregation",
    "Algorithm",
    "Groups",
    "SampleFacts",
    "Scope",
    "TokenLoss",
    "Tokens",
    "aggregate",
    "algorithm_file",
    "clip_ratio",
    "clipped_surrogate",
    "denominator",
    "effective_sample_size",
    "group_advantages",
    "is_clamped",
    "k3_kl",
    "leave_one_out_advantages",
    "load_algorithm",
    "log_ratio",
    "logprob_difference",
    "policy_kl",
    "probability_ratio",
    "rewards_of",
    "truncated_importance_weights",
]
