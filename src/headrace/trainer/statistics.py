"""What the tokens of a step say about how far trainer and generator are apart, as sums that can be merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.algorithms import k3_kl


@dataclass(slots=True)
class TokenStatistics:
    """Sums over tokens; merging two is the same as having taken them together.

    `current` counts the tokens sampled by the very weights that are trained, over KV of those weights: only
    over them does a difference between trainer and generator mean an error rather than policy drift.

    Attributes:
        tokens: tokens whose log-probs were computed.
        current, current_sum, current_max: how many are current; sum and largest |logp − logp_μ| over
            them.
        ratio_sum, ratio_square_sum: Σρ and Σρ², ρ = π/μ.
        k3_sum: Σ of k3 estimates of KL(μ ‖ π).
        clipped: tokens whose surrogate was clipped.
        aged, staleness_sum, staleness_max: tokens whose age is known (those without a gradient too), the sum
            and the largest of their staleness.
    """

    tokens: int = 0
    current: int = 0
    current_sum: float = 0.0
    current_max: float = 0.0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    k3_sum: float = 0.0
    clipped: int = 0
    aged: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def add_tokens(self, logp: Tensor, logp_behaviour: Tensor, current: Tensor, clipped: Tensor) -> None:
        """Count T scored tokens; all arguments are [T], on the CPU. `add_staleness` counts their age."""
        logp, logp_behaviour = logp.detach().to(torch.float64), logp_behaviour.to(torch.float64)
        ratio = (logp - logp_behaviour).exp()
        difference = (logp - logp_behaviour).abs()[current]
        self.tokens += len(logp)
        self.current += len(difference)
        self.current_sum += float(difference.sum())
        self.current_max = max(self.current_max, float(difference.max()) if len(difference) else 0.0)
        self.ratio_sum += float(ratio.sum())
        self.ratio_square_sum += float(ratio.square().sum())
        self.k3_sum += float(k3_kl(logp_behaviour, logp).sum())
        self.clipped += int(clipped.sum())

    def add_current(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Count tokens of the current weights by (trainer's, generator's) log-probs, for the difference alone."""
        differences = [abs(ours - theirs) for ours, theirs in pairs]
        self.current += len(differences)
        self.current_sum += sum(differences)
        self.current_max = max([self.current_max, *differences])

    def add_staleness(self, staleness: list[int]) -> None:
        """Count the ages of tokens that a step consumes."""
        self.aged += len(staleness)
        self.staleness_sum += sum(staleness)
        self.staleness_max = max([self.staleness_max, *staleness])

    def merge(self, other: TokenStatistics) -> None:
        """Add another's tokens to these."""
        for name in self.__slots__:
            combine = max if name.endswith("_max") else lambda a, b: a + b
            setattr(self, name, combine(getattr(self, name), getattr(other, name)))

    @property
    def logprob_diff_mean(self) -> float | None:
        """Mean |logp − logp_μ| over current tokens, None when there are none."""
        return self.current_sum / self.current if self.current else None

    @property
    def logprob_diff_max(self) -> float | None:
        """Largest |logp − logp_μ| over current tokens, None when there are none."""
        return self.current_max if self.current else None

    @property
    def ess(self) -> float | None:
        """Effective sample size as a share of the tokens, (Σρ)² / (N Σρ²); None without tokens."""
        return self.ratio_sum**2 / (self.tokens * self.ratio_square_sum) if self.tokens else None

    @property
    def kl(self) -> float | None:
        """Mean k3 estimate of KL(μ ‖ π); None without tokens."""
        return self.k3_sum / self.tokens if self.tokens else None

    @property
    def clipped_ratio(self) -> float:
        """Share of tokens whose surrogate was clipped."""
        return self.clipped / self.tokens if self.tokens else 0.0

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.aged if self.aged else 0.0
