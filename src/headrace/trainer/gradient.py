"""The gradient of a step's groups, as a sum that grows.

Invariants
* The sum is unnormalised, with the denominator that it is divided by once, in the optimizer's step. Any partition of a
  batch over `add` calls and micro-batches gives the same sum, to within rounding.
* No token older than the bound is added: `add` raises before any work.
* A group whose samples have no advantage is run only for a KL term; it counts in the denominator all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headrace.algorithms import Algorithm, TokenLoss, Tokens
from headrace.errors import NonFiniteError, RunError
from headrace.measures import GradientResult, SampleFacts, SampleOutcome, TokenStatistics, facts_of
from headrace.schedule import Bucket
from headrace.trainer.logprobs import packed_logprobs
from headrace.trainer.packing import MicroBatch, pack
from headrace.trainer.statistics import token_statistics_of
from headrace.types import Trajectory, TrajectoryId

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOWER_RATE = ". A lower trainer.learning_rate is the usual cure"

Batch = Mapping[int, Sequence[SampleFacts]]
"""The facts of all groups of a step by the group's id, in the step's order."""


class _Sample(NamedTuple):
    """A row of a trajectory in the loss, its advantage, and how many tokens the whole trajectory has sampled."""

    trajectory: Trajectory
    advantage: float
    length: int


class GradientSum:
    """Adds up gradients in the parameters' `grad`.

    Args:
        module: whose parameters hold the sum.
        reference: the model of the KL term, if there is one.
        micro_batch_tokens: packed tokens per forward and backward.

    Attributes:
        result: what was added so far.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        algorithm: Algorithm,
        micro_batch_tokens: int,
        reference: PreTrainedModel | None,
    ) -> None:
        self.module, self.reference = module, reference
        self.algorithm, self.micro_batch_tokens = algorithm, micro_batch_tokens
        self.result = GradientResult()
        self._device = next(module.parameters()).device
        self._taken: list[list[_Sample]] = []
        self._batch: Batch | None = None

    @property
    def taken(self) -> set[TrajectoryId]:
        """The trajectories whose gradient is in the sum."""
        return {sample.trajectory.id for members in self._taken for sample in members}

    def reset(self) -> None:
        """Forget everything that was added."""
        # Set to None, not to zero: the next backward then hands over its buffer instead of adding to one.
        for parameter in self.module.parameters():
            parameter.grad = None
        self.result = GradientResult()
        self._taken = []
        self._batch = None

    def add(
        self,
        groups: Sequence[Sequence[Trajectory]],
        *,
        version: int,
        max_staleness: int,
        batch: Batch | None,
        step: int,
    ) -> GradientResult:
        """Add the gradient of some groups; arguments and errors are those of `Trainer.accumulate`.

        Args:
            step: the number of the step, for messages.
        """
        groups = [group for group in groups if group]
        self._check_rewards(groups, step)
        check_staleness(groups, version, max_staleness)
        result, samples = self._admit(groups, version, batch, step)
        flat = [sample for group in samples for sample in group]
        try:
            for packed in self.pack([[sample.trajectory for sample in group] for group in samples]):
                members = [flat[member] for member in packed.members]
                result.loss_sum += self._backward(packed, members, version, result.statistics, step)
                result.micro_batches += 1
                self._taken.append(members)
        except BaseException:
            # Half of these groups may be in the gradients, and nobody could tell which half.
            self.reset()
            raise
        self.result.merge(result)
        return result

    def gradients(self) -> dict[str, Tensor]:
        """The sum, by parameter; those without any are left out."""
        return {
            name: parameter.grad
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }

    def norm(self) -> float:
        """The global norm of the sum."""
        return torch.nn.utils.get_total_norm(list(self.gradients().values())).item()

    def pack(self, groups: Sequence[Sequence[Trajectory]]) -> list[MicroBatch]:
        return pack(groups, self.micro_batch_tokens, self._device)

    def culprits(self) -> list[TrajectoryId]:
        """The trajectories whose own gradient is not finite, found by taking them again one by one. The sum is lost."""

        def spoils(samples: Sequence[_Sample]) -> bool:
            for parameter in self.module.parameters():
                parameter.grad = None
            for packed in self.pack([[sample.trajectory for sample in samples]]):
                members = [samples[member] for member in packed.members]
                losses = self._losses(self._tokens(packed, members)).loss
                torch.autograd.backward(self._sum(packed, members, losses))
            return not math.isfinite(self.norm())

        suspects = [sample for samples in self._taken if spoils(samples) for sample in samples]
        guilty = [sample for sample in suspects if spoils([sample])]
        # A sum may overflow although each part is finite: then all of them are named.
        named = guilty or suspects or [sample for samples in self._taken for sample in samples]
        return [sample.trajectory.id for sample in named]

    def _admit(
        self, groups: Sequence[Sequence[Trajectory]], version: int, batch: Batch | None, step: int
    ) -> tuple[GradientResult, list[list[_Sample]]]:
        """Account for every token, and choose the samples of each group whose gradient is to be taken."""
        algorithm = self.algorithm
        result = GradientResult()
        samples: list[list[_Sample]] = []
        lengths: list[int] = []
        for group, advantages in zip(groups, self._advantages(groups, batch, step), strict=True):
            needs_gradient = algorithm.needs_gradient(advantages)
            result.zero_advantage_groups += algorithm.no_advantage(advantages)
            samples.append([])
            for trajectory, advantage in zip(group, advantages, strict=True):
                length = trajectory.num_sampled
                if algorithm.settings.mask_truncated and not trajectory.complete:
                    bucket = Bucket.MASKED
                else:
                    bucket = Bucket.TRAINED if needs_gradient else Bucket.ZERO_ADVANTAGE
                    if length:
                        lengths.append(length)
                    result.statistics.add_staleness(_staleness(trajectory, version))
                result.samples.append(SampleOutcome(trajectory.id, bucket, length, advantage))
                if bucket is Bucket.TRAINED:
                    samples[-1].extend(_Sample(row, advantage, length) for row in trajectory.rows)
        result.denominator = algorithm.denominator(lengths)
        return result, samples

    def _advantages(
        self, groups: Sequence[Sequence[Trajectory]], batch: Batch | None, step: int
    ) -> list[list[float]]:
        if not groups:
            return []
        facts = [facts_of(group) for group in groups]
        if self.algorithm.scope == "batch":
            ids = [group[0].id.group for group in groups]
            if batch is None or any(list(batch.get(i, ())) != f for i, f in zip(ids, facts, strict=True)):
                raise ValueError(
                    "an algorithm whose scope is the batch needs the facts of all of its groups, these among them"
                )
            if self._batch not in (None, batch):
                raise ValueError("the batch is another one than when the step's first gradient was taken")
            self._batch = batch
            found = dict(zip(batch, self.algorithm.advantages_of(list(batch.values())), strict=True))
            advantages = [found[i] for i in ids]
        else:
            advantages = self.algorithm.advantages_of(facts)
        bad = [
            trajectory.id
            for group, values in zip(groups, advantages, strict=True)
            for trajectory, value in zip(group, values, strict=True)
            if not math.isfinite(value)
        ]
        if bad:
            name = type(self.algorithm).__name__
            raise self.discard(step, f"an advantage of {name} is not finite", bad, cure="")
        return advantages

    def _backward(
        self,
        packed: MicroBatch,
        samples: Sequence[_Sample],
        version: int,
        statistics: TokenStatistics,
        step: int,
    ) -> float:
        """Take one micro-batch's gradient; returns its loss sum."""
        tokens = self._tokens(packed, samples)
        losses, clipped = self._losses(tokens)
        self._check_finite(packed, tokens, losses, step)
        loss_sum = self._sum(packed, samples, losses)
        torch.autograd.backward(loss_sum)
        fresh_kv = torch.tensor([not trajectory.mixed_kv for trajectory in packed.trajectories])[
            packed.owners
        ]
        current = (packed.versions == version) & fresh_kv
        statistics.merge(
            token_statistics_of(
                tokens.logp.detach().cpu(),
                packed.logp_behaviour,
                current,
                clipped.cpu(),
                tokens.clamped.cpu(),
            )
        )
        return loss_sum.item()

    def _tokens(self, packed: MicroBatch, samples: Sequence[_Sample]) -> Tokens:
        logp = packed_logprobs(self.module, packed)
        logp_ref = None
        if self.algorithm.settings.kl_coef > 0 and self.reference is not None:
            with torch.no_grad():
                logp_ref = packed_logprobs(self.reference, packed)
        advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64)
        return Tokens(
            logp=logp,
            logp_behaviour=packed.logp_behaviour.to(logp.dtype).to(logp.device),
            advantages=advantages[packed.owners].to(logp.dtype).to(logp.device),
            lengths=_lengths(packed, samples).to(logp.device),
            sequences=packed.owners.to(logp.device),
            logp_ref=logp_ref,
        )

    def _losses(self, tokens: Tokens) -> TokenLoss:
        return self.algorithm.token_losses(tokens)

    def _sum(self, packed: MicroBatch, samples: Sequence[_Sample], losses: Tensor) -> Tensor:
        return self.algorithm.loss_sum(losses, _lengths(packed, samples).to(losses.device))

    def _check_finite(self, packed: MicroBatch, tokens: Tokens, losses: Tensor, step: int) -> None:
        # Behaviour log-probs are looked at themselves: clamping makes the loss of an infinite one finite.
        inputs = tokens.logp.isfinite() & tokens.logp_behaviour.isfinite()
        finite = (losses.isfinite() & inputs).cpu()
        if finite.all():
            return
        ids = [packed.trajectories[owner].id for owner in sorted(set(packed.owners[~finite].tolist()))]
        if inputs.all() and self.algorithm.settings.file is not None:
            name = type(self.algorithm).__name__
            raise self.discard(
                step, f"a loss of {name} is not finite, though its log-probs are", ids, cure=""
            )
        raise self.discard(step, "a loss is not finite", ids)

    def discard(
        self, step: int, message: str, culprits: Sequence[TrajectoryId], cure: str = LOWER_RATE
    ) -> NonFiniteError:
        """Reset, and make the error that names `culprits`."""
        self.reset()
        shown = ", ".join(map(str, culprits[:8]))
        shown += f" and {len(culprits) - 8} more" if len(culprits) > 8 else ""
        return NonFiniteError(
            f"step {step}: {message} (trajectories {shown}); weights were not changed{cure}",
            culprits,
        )

    def _check_rewards(self, groups: Iterable[Sequence[Trajectory]], step: int) -> None:
        bad = [t.id for group in groups for t in group if t.reward is None or not math.isfinite(t.reward)]
        if bad:
            raise self.discard(step, "a reward is not a finite number", bad)


def _lengths(packed: MicroBatch, samples: Sequence[_Sample]) -> Tensor:
    return torch.tensor([sample.length for sample in samples])[packed.owners]


def _staleness(trajectory: Trajectory, version: int) -> list[int]:
    return [
        version - v
        for row in trajectory.rows
        for v, sampled in zip(row.versions, row.sampled, strict=True)
        if sampled
    ]


def check_staleness(groups: Iterable[Sequence[Trajectory]], version: int, max_staleness: int) -> None:
    """Raise RunError if a token is above the bound or from a later version."""
    for group in groups:
        for trajectory in group:
            for staleness in _staleness(trajectory, version):
                if not 0 <= staleness <= max_staleness:
                    raise RunError(
                        f"trajectory {trajectory.id} has a token of version {version - staleness}, which may "
                        f"not be trained at version {version} with max_staleness = {max_staleness}"
                    )
