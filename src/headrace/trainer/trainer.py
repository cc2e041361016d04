"""The trainer: takes gradients of committed groups as they come, then makes one optimizer step of them.

Invariants
* Gradients accumulate as unnormalised sums (`gradient.py`); `step` divides them once by the batch's denominator, then
  clips. Any partition of a batch over `accumulate` calls, micro-batches and trainers gives the same step, to within
  rounding.
* Weights change only in `step`, and only if the loss and every gradient are finite.
* The module is in evaluation mode: the policy that is trained is the one that sampled, without dropout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.algorithms import Algorithm
from headrace.config import TrainerConfig
from headrace.errors import ConfigError, NonFiniteError, RunError
from headrace.kernels.fingerprint import fingerprint
from headrace.measures import GradientResult
from headrace.models.fused import use_kernels
from headrace.schedule import Bucket
from headrace.trainer.attention import check_packable
from headrace.trainer.contribution import Exported, total
from headrace.trainer.gradient import Batch, GradientSum
from headrace.trainer.logprobs import packed_logprobs
from headrace.trainer.optimizer import (
    adopt_settings,
    export_moments,
    import_moments,
    learning_rate_at,
    make_adamw,
)
from headrace.types import Trajectory, TrajectoryId

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


class Trainer:
    """Owns the module's gradients and its optimizer.

    Args:
        module: a Hugging Face causal LM, trained in place.
        algorithm: advantages and loss.
        trainer_config: the optimizer.
        total_steps: steps of the run, for the learning rate's schedule.
        reference: the model of the KL term, frozen here; needed if `kl_coef` is above 0.

    Raises:
        ConfigError: a KL term without a reference.
        ModelError: an architecture that cannot be packed.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        algorithm: Algorithm,
        trainer_config: TrainerConfig,
        total_steps: int,
        reference: PreTrainedModel | None = None,
    ) -> None:
        _check_reference(algorithm, reference)
        check_packable(module)
        for model in (module, reference):
            if model is not None:
                use_kernels(model)
        self.module = module.requires_grad_(True).train(False)
        self.reference = None if reference is None else reference.requires_grad_(False).train(False)
        self.algorithm = algorithm
        self.trainer_config = trainer_config
        self.total_steps = total_steps
        self.steps = 0
        self._optimizer = make_adamw(module, trainer_config)
        self._sum = GradientSum(self.module, algorithm, trainer_config.micro_batch_tokens, self.reference)

    def configure(self, algorithm: Algorithm, trainer_config: TrainerConfig, total_steps: int) -> None:
        """Go on under other settings; AdamW keeps its moments. Weights, moments and steps stay.

        Raises:
            ConfigError: a KL term, and the trainer was made without a reference.
            RunError: the step under way has gradients of another loss.
        """
        _check_reference(algorithm, self.reference)
        if self._sum.result.samples and algorithm.settings != self.algorithm.settings:
            raise RunError("the settings of [algorithm] cannot change within a step")
        self.algorithm, self.trainer_config, self.total_steps = algorithm, trainer_config, total_steps
        self._sum.algorithm, self._sum.micro_batch_tokens = algorithm, trainer_config.micro_batch_tokens
        adopt_settings(self._optimizer, trainer_config)

    def accumulate(
        self,
        groups: Sequence[Sequence[Trajectory]],
        *,
        version: int,
        max_staleness: int,
        batch: Batch | None = None,
    ) -> GradientResult:
        """Take the gradient of some groups of the step, at the current weights.

        A group without any advantage counts in the denominator; its gradient is run only for a KL term.

        Args:
            groups: the valid, rewarded trajectories of each group.
            version: the policy version being trained.
            max_staleness: the bound on `version` minus a token's version.
            batch: the facts of all groups of the step (`facts_of`) by the group's id, in the step's order; read if the
                algorithm's scope is "batch".

        Raises:
            RunError: a token is above the bound or from a later version (nothing was accumulated), or the algorithm
                returned what is no advantage or no loss.
            ValueError: `batch` is needed and does not hold these groups, or changed within the step.
            NonFiniteError: a reward, log-prob, advantage or loss is not finite; the ids of the trajectories that caused
                it are in the exception's attribute `trajectories`. This and any other error during the work
                discards the gradients of the whole step.
        """
        return self._sum.add(
            groups, version=version, max_staleness=max_staleness, batch=batch, step=self.steps + 1
        )

    def export(self) -> Exported:
        """Hand over what was accumulated; the trainer's own sum is empty then."""
        exported = Exported(self._sum.gradients(), self._sum.result)
        self._sum.reset()
        return exported

    def step(self, parts: Sequence[Exported] | None = None) -> StepResult:
        """Turn the accumulated gradients into new weights, if there are any.

        Args:
            parts: take these sums, added in this order, instead of the trainer's own, which must be empty.

        Raises:
            NonFiniteError: a gradient is not finite. Weights are as they were and the gradients discarded;
                the ids of the trajectories that caused it are in the exception's attribute `trajectories`: of `parts`,
                all those in a part that is not finite.
            ValueError: parts although there is a sum of the trainer's own, or of another model.
        """
        if parts is not None:
            self._adopt(parts)
        gradient = self._sum.result
        rate = learning_rate_at(self.trainer_config, self.steps, self.total_steps)
        norm = 0.0
        gradients = list(self._sum.gradients().values())
        if gradients:
            norm = self._sum.norm() / gradient.denominator
            if not math.isfinite(norm):
                raise self._not_finite(parts)
            # One pass divides by the denominator and clips; 1e-6 as in torch.nn.utils.clip_grad_norm_.
            scale = min(1.0, self.trainer_config.max_grad_norm / (norm + 1e-6)) / gradient.denominator
            for grad in gradients:
                grad.mul_(scale)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        loss = gradient.loss_sum / gradient.denominator if gradient.denominator else 0.0
        self.reset()
        self.steps += 1
        return StepResult(bool(gradients), loss, norm, rate, gradient)

    def reset(self) -> None:
        """Forget what was accumulated since the last step."""
        self._sum.reset()

    def taken(self) -> set[TrajectoryId]:
        """The trajectories whose gradient is in the trainer's sum."""
        return self._sum.taken

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
        for packed in self._sum.pack([trajectories]):
            for owner, logp in zip(
                packed.owners.tolist(), packed_logprobs(self.module, packed).tolist(), strict=True
            ):
                logprobs[packed.members[owner]].append(logp)
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

    def _adopt(self, parts: Sequence[Exported]) -> None:
        """Make the sum of `parts` the trainer's own."""
        if self._sum.result.samples:
            raise ValueError("the trainer has a sum of its own: export it and give it as a part")
        parameters = dict(self.module.named_parameters())
        for part in parts:
            for name, tensor in part.gradients.items():
                if name not in parameters or parameters[name].shape != tensor.shape:
                    raise ValueError(f"a part's gradient of {name} does not fit the model")
        added = total(parts)
        for name, tensor in added.gradients.items():
            parameters[name].grad = tensor.to(parameters[name])
        self._sum.result = added.result

    def _not_finite(self, parts: Sequence[Exported] | None) -> NonFiniteError:
        if parts is None:
            culprits = self._sum.culprits()
        else:
            spoilt = [p for p in parts if not all(t.isfinite().all() for t in p.gradients.values())]
            culprits = [
                sample.id
                for part in spoilt or parts
                for sample in part.result.samples
                if sample.bucket is Bucket.TRAINED
            ]
        return self._sum.discard(self.steps + 1, "a gradient is not finite", culprits)


def _check_reference(algorithm: Algorithm, reference: PreTrainedModel | None) -> None:
    if algorithm.settings.kl_coef > 0 and reference is None:
        raise ConfigError("algorithm.kl_coef is above 0, which needs a reference model; set it to 0 for none")
