"""What is known of samples, tokens and gradients, as plain data that can be merged, journaled and read back.

Invariants
* Sums: merging two is the same as having taken both together. Floats survive JSON exactly.
* This module imports no torch; what turns tensors into these sums is `trainer/statistics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from headrace.schedule import Bucket
from headrace.types import Trajectory, TrajectoryId


class SampleFacts(NamedTuple):
    """What an algorithm may know of a valid sample when it decides about advantages.

    `length` counts the sampled tokens of all its rows; `complete` says whether it ended by itself.
    """

    reward: float
    length: int
    complete: bool


def facts_of(trajectories: Sequence[Trajectory]) -> list[SampleFacts]:
    """The facts of a group's valid samples, in their order.

    Raises:
        ValueError: one has no reward.
    """
    facts = []
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise ValueError(f"trajectory {trajectory.id} has no reward")
        facts.append(SampleFacts(trajectory.reward, trajectory.num_sampled, trajectory.complete))
    return facts


@dataclass(slots=True)
class Divergence:
    """How far a policy π is from the μ that sampled N tokens.

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

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(slots=True)
class TokenStatistics:
    """Sums over tokens.

    Attributes:
        drift: all scored tokens, whatever weights sampled them.
        mismatch: those sampled by the very weights that are trained, over KV of those weights: only over them does
            a difference between trainer and generator mean that they compute differently, rather than that the
            policy has moved on.
        clipped: tokens that the algorithm says it clipped.
        clamped: tokens whose log-ratio was beyond what is computed with (`algorithms/ratios.py`).
        aged, staleness_sum, staleness_max: tokens whose age is known (those without a gradient too), the sum
            and the largest of their staleness.
    """

    drift: Divergence = field(default_factory=Divergence)
    mismatch: Divergence = field(default_factory=Divergence)
    clipped: int = 0
    clamped: int = 0
    aged: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def add_staleness(self, staleness: Sequence[int]) -> None:
        """Count the ages of tokens that a step consumes."""
        self.aged += len(staleness)
        self.staleness_sum += sum(staleness)
        self.staleness_max = max([self.staleness_max, *staleness])

    def merge(self, other: TokenStatistics) -> None:
        """Add another's tokens to these."""
        _merge_sums(self, other)

    @property
    def clipped_ratio(self) -> float:
        """Share of scored tokens that were clipped."""
        return self.clipped / self.drift.tokens if self.drift.tokens else 0.0

    @property
    def clamped_ratio(self) -> float:
        """Share of scored tokens whose log-ratio was clamped."""
        return self.clamped / self.drift.tokens if self.drift.tokens else 0.0

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.aged if self.aged else 0.0

    def to_dict(self) -> dict[str, Any]:
        sums = {name: getattr(self, name) for name in self.__slots__}
        return sums | {"drift": self.drift.to_dict(), "mismatch": self.mismatch.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        parts = {name: Divergence.from_dict(data[name]) for name in ("drift", "mismatch")}
        return cls(**{**data, **parts})


def _merge_sums(ours: Divergence | TokenStatistics, others: Divergence | TokenStatistics) -> None:
    """Field by field: sums are added, of maxima (`..._max`) the larger is kept, parts merge themselves."""
    for name in ours.__slots__:
        mine, theirs = getattr(ours, name), getattr(others, name)
        if isinstance(mine, Divergence):
            mine.merge(theirs)
        else:
            setattr(ours, name, max(mine, theirs) if name.endswith("_max") else mine + theirs)


class SampleOutcome(NamedTuple):
    """What became of one sample of a step: the bucket in which its `tokens` sampled tokens end, and its advantage.

    The group is `id.group`.
    """

    id: TrajectoryId
    bucket: Bucket
    tokens: int
    advantage: float


@dataclass(slots=True)
class GradientResult:
    """What some groups added to the step; results of one step merge to its whole.

    Attributes:
        loss_sum: unnormalised sum of losses.
        denominator: what these groups add to the batch's denominator.
        samples: what became of every sample, group by group: `trained`, `zero_advantage` (its group has no
            advantage, and no gradient was run) or `masked` (left out of the loss because it was truncated).
        zero_advantage_groups: groups all of whose advantages are 0.
        micro_batches: packed forwards and backwards.
        statistics: sums over the tokens.
    """

    loss_sum: float = 0.0
    denominator: float = 0
    samples: list[SampleOutcome] = field(default_factory=list)
    zero_advantage_groups: int = 0
    micro_batches: int = 0
    statistics: TokenStatistics = field(default_factory=TokenStatistics)

    @property
    def tokens_trained(self) -> int:
        """Sampled tokens whose gradient was taken."""
        return self._tokens(Bucket.TRAINED)

    @property
    def tokens_zero_advantage(self) -> int:
        """Sampled tokens of groups without any advantage, for which no gradient was run."""
        return self._tokens(Bucket.ZERO_ADVANTAGE)

    @property
    def tokens_masked(self) -> int:
        """Sampled tokens of truncated trajectories that were left out of the loss."""
        return self._tokens(Bucket.MASKED)

    def _tokens(self, bucket: Bucket) -> int:
        return sum(sample.tokens for sample in self.samples if sample.bucket is bucket)

    def merge(self, other: GradientResult) -> None:
        """Add another's groups to these."""
        self.loss_sum += other.loss_sum
        self.denominator += other.denominator
        self.samples.extend(other.samples)
        self.zero_advantage_groups += other.zero_advantage_groups
        self.micro_batches += other.micro_batches
        self.statistics.merge(other.statistics)

    def to_dict(self) -> dict[str, Any]:
        return {
            "loss_sum": self.loss_sum,
            "denominator": self.denominator,
            "samples": [[*s.id, s.bucket.value, s.tokens, s.advantage] for s in self.samples],
            "zero_advantage_groups": self.zero_advantage_groups,
            "micro_batches": self.micro_batches,
            "statistics": self.statistics.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        samples = [
            SampleOutcome(TrajectoryId(group, sample, attempt), Bucket(bucket), tokens, advantage)
            for group, sample, attempt, bucket, tokens, advantage in data["samples"]
        ]
        statistics = TokenStatistics.from_dict(data["statistics"])
        return cls(**{**data, "samples": samples, "statistics": statistics})
