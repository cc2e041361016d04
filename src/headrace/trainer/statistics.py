"""What the tokens of a step say about how far trainer and generator are apart, as sums that can be merged."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.algorithms import k3_kl


@dataclass(slots=True)
class Divergence:
    """How far a policy π is from the μ that sampled N tokens; merging two is the same as having taken them together.

    Attributes:
        tokens: N.
        difference_sum, difference_max: sum and largest of |log π − log μ|.
        ratio_sum, ratio_square_sum: Σρ and Σρ², ρ = π/μ.
        k3_sum: Σ of k3 estimates of KL(μ ‖ π).
    """

    tokens: int = 0
    difference_sum: float = 0.0
    difference_max: float = 0.0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    k3_sum: float = 0.0

    def add(self, logp: Tensor, logp_behaviour: Tensor) -> None:
        """Count T tokens by their log-probs under π and under μ; both are [T], on the CPU."""
        if not len(logp):
            return
        logp, logp_behaviour = logp.detach().to(torch.float64), logp_behaviour.to(torch.float64)
        difference = logp - logp_behaviour
        ratio = difference.exp()
        self.tokens += len(difference)
        self.difference_sum += float(difference.abs().sum())
        self.difference_max = max(self.difference_max, float(difference.abs().max()))
        self.ratio_sum += float(ratio.sum())
        self.ratio_square_sum += float(ratio.square().sum())
        self.k3_sum += float(k3_kl(logp_behaviour, logp).sum())

    def merge(self, other: Divergence) -> None:
        """Add another's tokens to these."""
        _merge_sums(self, other)

    @property
    def difference_mean(self) -> float | None:
        """Mean |log π − log μ|; None without tokens."""
        return self.difference_sum / self.tokens if self.tokens else None

    @property
    def ess(self) -> float | None:
        """Kish's effective sample size as a share of the tokens, (Σρ)² / (N Σρ²); None without tokens."""
        return self.ratio_sum**2 / (self.tokens * self.ratio_square_sum) if self.tokens else None

    @property
    def kl(self) -> float | None:
        """Mean k3 estimate of KL(μ ‖ π); None without tokens."""
        return self.k3_sum / self.tokens if self.tokens else None


@dataclass(slots=True)
class TokenStatistics:
    """Sums over tokens; merging two is the same as having taken them together.

    Attributes:
        drift: all scored tokens, whatever weights sampled them.
        mismatch: those sampled by the very weights that are trained, over KV of those weights: only over them does
            a difference between trainer and generator mean that they compute differently, rather than that the
            policy has moved on.
        clipped: tokens whose surrogate was clipped.
        aged, staleness_sum, staleness_max: tokens whose age is known (those without a gradient too), the sum
            and the largest of their staleness.
    """

    drift: Divergence = field(default_factory=Divergence)
    mismatch: Divergence = field(default_factory=Divergence)
    clipped: int = 0
    aged: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def add_tokens(self, logp: Tensor, logp_behaviour: Tensor, current: Tensor, clipped: Tensor) -> None:
        """Count T scored tokens; all arguments are [T], on the CPU. `add_staleness` counts their age.

        Args:
            current: true where the weights being trained sampled the token over KV of their own.
        """
        self.drift.add(logp, logp_behaviour)
        self.mismatch.add(logp[current], logp_behaviour[current])
        self.clipped += int(clipped.sum())

    def add_staleness(self, staleness: list[int]) -> None:
        """Count the ages of tokens that a step consumes."""
        self.aged += len(staleness)
        self.staleness_sum += sum(staleness)
        self.staleness_max = max([self.staleness_max, *staleness])

    def merge(self, other: TokenStatistics) -> None:
        """Add another's tokens to these."""
        _merge_sums(self, other)

    @property
    def clipped_ratio(self) -> float:
        """Share of scored tokens whose surrogate was clipped."""
        return self.clipped / self.drift.tokens if self.drift.tokens else 0.0

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.aged if self.aged else 0.0


def _merge_sums(ours: Divergence | TokenStatistics, others: Divergence | TokenStatistics) -> None:
    """Field by field: sums are added, of maxima (`..._max`) the larger is kept, parts merge themselves."""
    for name in ours.__slots__:
        mine, theirs = getattr(ours, name), getattr(others, name)
        if isinstance(mine, Divergence):
            mine.merge(theirs)
        else:
            setattr(ours, name, max(mine, theirs) if name.endswith("_max") else mine + theirs)
