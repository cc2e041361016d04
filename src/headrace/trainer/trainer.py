"""The trainer: takes gradients of committed groups as they come, then makes one optimizer step of them.

Invariants
* Gradients accumulate as unnormalised sums; `step` divides them once by the batch's denominator, then clips.
  Any partition of a batch over `accumulate` calls and micro-batches gives the same step, to within rounding.
* No token older than the bound is trained: `accumulate` raises before any work.
* Weights change only in `step`, and only if the loss and every gradient are finite.
* The module is in evaluation mode: the policy that is trained is the one that sampled, without dropout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.algorithms import TokenLoss, aggregate, denominator, group_advantages, token_loss
from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.errors import ConfigError, NonFiniteError, RunError
from headrace.kernels.fingerprint import fingerprint
from headrace.models.fused import use_kernels
from headrace.trainer.attention import check_packable
from headrace.trainer.logprobs import packed_logprobs
from headrace.trainer.optimizer import export_moments, import_moments, learning_rate_at, make_adamw
from headrace.trainer.packing import MicroBatch, pack
from headrace.trainer.statistics import TokenStatistics
from headrace.types import Trajectory, TrajectoryId


@dataclass(slots=True)
class GradientResult:
    """What some groups added to the step; results of one step merge to its whole.

    Attributes:
        loss_sum: unnormalised sum of losses.
        denominator: what these groups add to the batch's denominator.
        tokens_trained: sampled tokens whose gradient was taken.
        tokens_zero_advantage: sampled tokens of groups without any advantage, for which no gradient was run.
        tokens_masked: sampled tokens of truncated trajectories that were left out of the loss.
        zero_advantage_groups: groups whose rewards are all equal.
        micro_batches: packed forwards and backwards.
    """

    loss_sum: float = 0.0
    denominator: int = 0
    tokens_trained: int = 0
    tokens_zero_advantage: int = 0
    tokens_masked: int = 0
    zero_advantage_groups: int = 0
    micro_batches: int = 0
    statistics: TokenStatistics = field(default_factory=TokenStatistics)

    def merge(self, other: GradientResult) -> None:
        """Add another's groups to these."""
        for name in self.__slots__:
            if name == "statistics":
                self.statistics.merge(other.statistics)
            else:
                setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step.

    Attributes:
        updated: whether weights changed; false when no group of the step had a gradient.
        loss: the batch's loss, divided by its denominator.
        grad_norm: global norm of the divided gradients, before clipping; 0 when there were none.
        learning_rate: the rate of this step.
        gradient: everything accumulated for the step.
    """

    updated: bool
    loss: float
    grad_norm: float
    learning_rate: float
    gradient: GradientResult


class _Sample(NamedTuple):
    """A row of a trajectory in the loss, its advantage, and how many tokens the whole trajectory has sampled."""

    trajectory: Trajectory
    advantage: float
    length: int


class Trainer:
    """Owns the module's gradients and its optimizer.

    Args:
        module: a Hugging Face causal LM, trained in place.
        config: the loss.
        trainer_config: the optimizer.
        total_steps: steps of the run, for the learning rate's schedule.
        reference: the model of the KL term, frozen here; needed if `config.kl_coef` is above 0.

    Raises:
        ConfigError: a KL term without a reference.
        ModelError: an architecture that cannot be packed.
    """

    def __init__(
        self,
        module: nn.Module,
        config: AlgorithmConfig,
        trainer_config: TrainerConfig,
        total_steps: int,
        reference: nn.Module | None = None,
    ) -> None:
        if config.kl_coef > 0 and reference is None:
            raise ConfigError(
                "algorithm.kl_coef is above 0, which needs a reference model; set it to 0 for none"
            )
        check_packable(module)
        for model in (module, reference):
            if model is not None:
                use_kernels(model)
        self.module = module.requires_grad_(True).eval()
        self.reference = None if reference is None else reference.requires_grad_(False).eval()
        self.config = config
        self.trainer_config = trainer_config
        self.total_steps = total_steps
        self.steps = 0
        self._optimizer = make_adamw(module, trainer_config)
        self._device = next(module.parameters()).device
        self._pending = GradientResult()
        self._taken: list[list[_Sample]] = []

    def accumulate(
        self, groups: Sequence[Sequence[Trajectory]], *, version: int, max_staleness: int
    ) -> GradientResult:
        """Take the gradient of some groups of the step, at the current weights.

        A group whose rewards are all equal counts in the denominator; its gradient is run only for a KL term.

        Args:
            groups: the valid, rewarded trajectories of each group.
            version: the policy version being trained.
            max_staleness: the bound on `version` minus a token's version.

        Raises:
            RunError: a token is above the bound or from a later version; nothing was accumulated.
            NonFiniteError: a reward, log-prob or loss is not finite; the ids of the trajectories that caused
                it are in the exception's attribute `trajectories`. This and any other error during the work
                discards the gradients of the whole step.
        """
        self._check_rewards(groups)
        _check_staleness(groups, version, max_staleness)
        result, samples = self._admit(groups, version)
        flat = [sample for group in samples for sample in group]
        try:
            for batch in self._pack([[sample.trajectory for sample in group] for group in samples]):
                members = [flat[member] for member in batch.members]
                result.loss_sum += self._gradient(batch, members, version, result.statistics)
                result.micro_batches += 1
                self._taken.append(members)
        except BaseException:
            # Half of these groups may be in the gradients, and nobody could tell which half.
            self.reset()
            raise
        self._pending.merge(result)
        return result

    def step(self) -> StepResult:
        """Turn the accumulated gradients into new weights, if there are any.

        Raises:
            NonFiniteError: a gradient is not finite. Weights are as they were and the gradients discarded;
                the ids of the trajectories that caused it are in the exception's attribute `trajectories`.
        """
        gradient = self._pending
        rate = learning_rate_at(self.trainer_config, self.steps, self.total_steps)
        norm = 0.0
        updated = bool(self._taken)
        if updated:
            norm = self._norm() / gradient.denominator
            if not math.isfinite(norm):
                raise self._discard("a gradient is not finite", self._culprits())
            # One pass divides by the denominator and clips; 1e-6 as in torch.nn.utils.clip_grad_norm_.
            scale = min(1.0, self.trainer_config.max_grad_norm / (norm + 1e-6)) / gradient.denominator
            for grad in self._gradients():
                grad.mul_(scale)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        loss = gradient.loss_sum / gradient.denominator if gradient.denominator else 0.0
        self.reset()
        self.steps += 1
        return StepResult(updated, loss, norm, rate, gradient)

    def reset(self) -> None:
        """Forget what was accumulated since the last step."""
        # Set to None, not to zero: the next backward then hands over its buffer instead of adding to one.
        self._optimizer.zero_grad(set_to_none=True)
        self._pending = GradientResult()
        self._taken = []

    def taken(self) -> set[TrajectoryId]:
        """The trajectories whose gradient was taken since the last step."""
        return {sample.trajectory.id for members in self._taken for sample in members}

    def digest(self) -> str:
        """What the weights are, bit for bit: names and contents of every parameter."""
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in self.module.named_parameters():
            digest.update(f"{name}:{fingerprint(parameter.detach())};".encode())
        return digest.hexdigest()

    @torch.no_grad()
    def token_logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Each sampled token's log-prob under the current weights, through the training forward.

        Of the last row of each; earlier rows are given as trajectories of their own.
        """
        logprobs: list[list[float]] = [[] for _ in trajectories]
        for batch in self._pack([trajectories]):
            for owner, logp in zip(
                batch.owners.tolist(), packed_logprobs(self.module, batch).tolist(), strict=True
            ):
                logprobs[batch.members[owner]].append(logp)
        return logprobs

    def state_dict(self) -> dict[str, Any]:
        """`steps`, and `moments` by parameter name. Gradients not yet stepped are not part of it."""
        return {"steps": self.steps, "moments": export_moments(self._optimizer, self.module)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; what was accumulated is discarded.

        Raises:
            UserError: the state belongs to another model; nothing was changed.
        """
        import_moments(self._optimizer, self.module, state["moments"])
        self.steps = state["steps"]
        self.reset()

    def _admit(
        self, groups: Iterable[Sequence[Trajectory]], version: int
    ) -> tuple[GradientResult, list[list[_Sample]]]:
        """Account for every token, and choose the samples of each group whose gradient is to be taken."""
        result = GradientResult()
        samples: list[list[_Sample]] = []
        lengths: list[int] = []
        for group in groups:
            if not group:
                continue
            rewards = torch.tensor([trajectory.reward for trajectory in group], dtype=torch.float64)
            advantages = group_advantages(rewards, self.config.normalize_std).tolist()
            zero = not any(advantages)
            result.zero_advantage_groups += zero
            samples.append([])
            for trajectory, advantage in zip(group, advantages, strict=True):
                length = trajectory.num_sampled
                if self.config.mask_truncated and not trajectory.complete:
                    result.tokens_masked += length
                    continue
                if not length:
                    continue
                lengths.append(length)
                result.statistics.add_staleness(_staleness(trajectory, version))
                if zero and self.config.kl_coef == 0:
                    result.tokens_zero_advantage += length
                else:
                    result.tokens_trained += length
                    samples[-1].extend(_Sample(row, advantage, length) for row in trajectory.rows)
        result.denominator = denominator(lengths, self.config.loss_aggregation)
        return result, samples

    def _pack(self, groups: Sequence[Sequence[Trajectory]]) -> list[MicroBatch]:
        return pack(groups, self.trainer_config.micro_batch_tokens, self._device)

    def _gradient(
        self, batch: MicroBatch, samples: Sequence[_Sample], version: int, statistics: TokenStatistics
    ) -> float:
        """Take one micro-batch's gradient; returns its loss sum."""
        logp = packed_logprobs(self.module, batch)
        losses, clipped = self._token_losses(batch, samples, logp)
        finite = (losses.isfinite() & logp.isfinite()).cpu()
        if not finite.all():
            owners = sorted(set(batch.owners[~finite].tolist()))
            raise self._discard("a loss is not finite", [samples[owner].trajectory for owner in owners])
        loss_sum = self._loss_sum(batch, samples, losses)
        loss_sum.backward()
        fresh_kv = torch.tensor([not trajectory.mixed_kv for trajectory in batch.trajectories])[batch.owners]
        current = (batch.versions == version) & fresh_kv
        statistics.add_tokens(logp.detach().cpu(), batch.logp_behaviour, current, clipped.cpu())
        return loss_sum.item()

    def _token_losses(self, batch: MicroBatch, samples: Sequence[_Sample], logp: Tensor) -> TokenLoss:
        config = self.config
        advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64)[batch.owners]
        logp_ref = None
        if config.kl_coef > 0 and self.reference is not None:
            with torch.no_grad():
                logp_ref = packed_logprobs(self.reference, batch)
        return token_loss(
            logp,
            batch.logp_behaviour.to(logp.dtype).to(logp.device),
            advantages.to(logp.dtype).to(logp.device),
            ratio=config.ratio,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            importance_cap=config.importance_cap,
            kl_coef=config.kl_coef,
            logp_ref=logp_ref,
        )

    def _loss_sum(self, batch: MicroBatch, samples: Sequence[_Sample], losses: Tensor) -> Tensor:
        lengths = torch.tensor([sample.length for sample in samples])[batch.owners]
        return aggregate(losses, lengths.to(losses.device), self.config.loss_aggregation)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def _norm(self) -> float:
        return torch.nn.utils.get_total_norm(self._gradients()).item()

    def _culprits(self) -> list[Trajectory]:
        """The trajectories whose own gradient is not finite, found by taking them again one by one."""

        def spoils(samples: Sequence[_Sample]) -> bool:
            self._optimizer.zero_grad(set_to_none=True)
            for batch in self._pack([[sample.trajectory for sample in samples]]):
                members = [samples[member] for member in batch.members]
                losses = self._token_losses(batch, members, packed_logprobs(self.module, batch)).loss
                self._loss_sum(batch, members, losses).backward()
            return not math.isfinite(self._norm())

        suspects = [sample for samples in self._taken if spoils(samples) for sample in samples]
        guilty = [sample for sample in suspects if spoils([sample])]
        # A sum may overflow although each part is finite: then all of them are named.
        named = guilty or suspects or [sample for samples in self._taken for sample in samples]
        return [sample.trajectory for sample in named]

    def _discard(self, message: str, culprits: Sequence[Trajectory]) -> NonFiniteError:
        """Reset, and make the error that names `culprits`."""
        self.reset()
        ids = tuple(trajectory.id for trajectory in culprits)
        shown = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        return NonFiniteError(
            f"step {self.steps + 1}: {message} (trajectories {shown}); weights were not changed. "
            "A lower trainer.learning_rate is the usual cure",
            ids,
        )

    def _check_rewards(self, groups: Iterable[Sequence[Trajectory]]) -> None:
        bad = [t for group in groups for t in group if t.reward is None or not math.isfinite(t.reward)]
        if bad:
            raise self._discard("a reward is not a finite number", bad)


def _staleness(trajectory: Trajectory, version: int) -> list[int]:
    return [
        version - v
        for row in trajectory.rows
        for v, sampled in zip(row.versions, row.sampled, strict=True)
        if sampled
    ]


def _check_staleness(groups: Iterable[Sequence[Trajectory]], version: int, max_staleness: int) -> None:
    for group in groups:
        for trajectory in group:
            for staleness in _staleness(trajectory, version):
                if not 0 <= staleness <= max_staleness:
                    raise RunError(
                        f"trajectory {trajectory.id} has a token of version {version - staleness}, which may "
                        f"not be trained at version {version} with max_staleness = {max_staleness}"
                    )
