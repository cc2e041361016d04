"""What paired measurements say about a ratio, without an assumption about how they are distributed.

Invariant: nothing is called slower or not slower unless the interval holds the median in 95 of 100 cases or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

BOUND = 0.97
"""A checkout that is at least so many times as fast as the other is not slower."""

CONFIDENCE = 0.95
PAIRS = 6
"""The fewest with which the interval can have that confidence."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The sign test's interval of the median: low, high, and how sure it is to hold it.

    It goes from the k-th smallest to the k-th largest value, which misses the median with probability
    2·P(Binomial(n, 1/2) < k); k is the largest whose interval has `CONFIDENCE`, or 1.
    """
    ordered, n = sorted(values), len(values)

    def confidence(k: int) -> float:
        return 1.0 - sum(comb(n, i) for i in range(k)) / float(2 ** (n - 1))

    k = max([k for k in range(1, n // 2 + 1) if confidence(k) >= CONFIDENCE], default=1)
    return ordered[k - 1], ordered[n - k], confidence(k)


def verdict(ratios: Sequence[float]) -> str:
    """What the pairs say about the bound."""
    low, high, confidence = interval(ratios)
    if confidence >= CONFIDENCE and low >= BOUND:
        return f"not below {BOUND:g}"
    return "below" if confidence >= CONFIDENCE and high < BOUND else "undecided"
