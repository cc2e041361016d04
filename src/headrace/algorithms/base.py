"""What an algorithm is: advantages from rewards, a loss per token, and how token losses become one number.

A built-in algorithm and a class of the user's own (docs/algorithms.md) derive from `Algorithm`, and write `advantages`
and `loss`. Line and trainer call the methods that check what those return.

Invariants
* An algorithm sees facts about samples and log-probs of tokens, never models, text or logits.
* It holds no state that changes: what it returns depends on its settings and arguments alone, so that steps can be
  taken again.
* Sums of losses add up over any partition of a batch, and so do denominators.
* Whether a group has an advantage is decided here and nowhere else.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from headrace.algorithms.aggregation import aggregate, denominator
from headrace.algorithms.ratios import is_clamped, k3_kl
from headrace.algorithms.surrogate import TokenLoss
from headrace.config import AlgorithmConfig
from headrace.errors import HeadraceError, RunError
from headrace.measures import SampleFacts
from headrace.presets import COMMON

Scope = Literal["group", "batch"]
Groups = Sequence[Sequence[SampleFacts]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Tokens:
    """T sampled tokens of one micro-batch; every tensor is [T].

    Attributes:
        logp: log-probs under the policy being trained; gradients flow through it.
        logp_behaviour: those that the generator reported, μ.
        advantages: that of each token's trajectory.
        lengths: |y|, how many tokens the policy sampled in each token's whole trajectory.
        sequences: which sequence each token belongs to, as an index from 0. All tokens of a sequence are here. Where a
            chat template rewrote history, a trajectory is several sequences, which may be in different micro-batches.
        logp_ref: log-probs under the reference model; None without a KL term.
    """

    logp: Tensor
    logp_behaviour: Tensor
    advantages: Tensor
    lengths: Tensor
    sequences: Tensor
    logp_ref: Tensor | None = None

    @property
    def clamped(self) -> Tensor:
        """[T], where a log-ratio to the generator or the reference is beyond ±20, whether or not the loss reads it."""
        clamped = is_clamped(self.logp, self.logp_behaviour)
        return clamped if self.logp_ref is None else clamped | is_clamped(self.logp, self.logp_ref)


class Algorithm(ABC):
    """From rewards to a loss.

    Attributes:
        scope: "group" if the advantages of a group depend on that group alone; "batch" if they need all groups of the
            step, whose gradients then wait until the step is complete.
        presets: the settings of `[algorithm]` that it reads beside those that every algorithm reads, and their values
            unless others are given.
        settings: every setting that is in force, set by `load_algorithm`.
    """

    scope: ClassVar[Scope] = "group"
    presets: ClassVar[Mapping[str, Any]] = COMMON
    settings: AlgorithmConfig

    @abstractmethod
    def advantages(self, groups: Groups) -> Sequence[Sequence[float] | Tensor]:
        """One advantage per sample, group by group.

        Args:
            groups: some groups of the step, or all of them in the step's order if `scope` is "batch". None is empty.
        """

    @abstractmethod
    def loss(self, tokens: Tokens) -> Tensor | TokenLoss:
        """The loss of each token, [T], to minimise, without the KL term; or with [T] booleans that say which were
        clipped. Zero on average does not matter, finite and differentiable in `tokens.logp` does."""

    def loss_sum(self, losses: Tensor, lengths: Tensor) -> Tensor:
        """The unnormalised sum of token losses, a scalar. `losses`, `lengths` (|y|): [T]."""
        return aggregate(losses, lengths, self.settings.loss_aggregation)

    def denominator(self, lengths: Sequence[int]) -> float:
        """What the sum over sequences of these lengths |y| is divided by."""
        return denominator(lengths, self.settings.loss_aggregation, self.settings.max_length)

    def advantages_of(self, groups: Groups) -> list[list[float]]:
        """`advantages`, checked.

        Raises:
            RunError: it raised, or there is not one number per sample.
        """
        sizes = [len(group) for group in groups]
        made = self._call("advantages", self.advantages, groups)
        try:
            result = [[float(value) for value in group] for group in made]
        except (TypeError, ValueError):
            raise self._wrong(
                "advantages", f"it must return a list of numbers per group, not {made!r:.80}"
            ) from None
        if [len(group) for group in result] != sizes:
            raise self._wrong(
                "advantages",
                f"it returned {[len(group) for group in result]} numbers for groups of {sizes} samples",
            )
        return result

    def token_losses(self, tokens: Tokens) -> TokenLoss:
        """`loss`, checked, plus β times the k3 estimate of the KL to the reference where there is one.

        Raises:
            RunError: it raised, is not [T], or has no gradient.
        """
        made = self._call("loss", self.loss, tokens)
        loss, clipped = (
            made if isinstance(made, tuple) else (made, torch.zeros_like(tokens.logp, dtype=torch.bool))
        )
        shape = tuple(tokens.logp.shape)
        for what, tensor in (("a loss", loss), ("clipped tokens", clipped)):
            if not isinstance(tensor, Tensor):
                raise self._wrong(
                    "loss", f"{what} must be a tensor {list(shape)}, not {type(tensor).__name__}"
                )
            if tuple(tensor.shape) != shape:
                raise self._wrong(
                    "loss",
                    f"{what} must have one value per token, {list(shape)}, not the shape {list(tensor.shape)}",
                )
        if tokens.logp.requires_grad and not loss.requires_grad:
            raise self._wrong("loss", "the loss has no gradient; compute it from tokens.logp, not detached")
        if self.settings.kl_coef > 0:
            if tokens.logp_ref is None:
                raise ValueError("a KL term needs the reference's log-probs")
            loss = loss + self.settings.kl_coef * k3_kl(tokens.logp, tokens.logp_ref)
        return TokenLoss(loss, clipped)

    def no_advantage(self, advantages: Sequence[float]) -> bool:
        """Whether a group with these advantages has none: all are exactly 0."""
        return not any(advantages)

    def needs_gradient(self, advantages: Sequence[float]) -> bool:
        """Whether a gradient must be run for a group with these advantages: it has one, or there is a KL term."""
        return self.settings.kl_coef > 0 or not self.no_advantage(advantages)

    def teaches_nothing(self, group: Sequence[SampleFacts]) -> bool:
        """Whether a finished group has no advantage, so that dynamic sampling may replace it.

        Never with the scope "batch": what a group's advantages are is known only when the batch is complete.
        """
        return self.scope == "group" and self.no_advantage(self.advantages_of([group])[0])

    def _call(self, method: str, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return function(*arguments)
        except HeadraceError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise self._wrong(method, f"it raised {text} ({frame.filename}:{frame.lineno})") from error

    def _wrong(self, method: str, what: str) -> RunError:
        return RunError(f"algorithm {type(self).__name__}, {method}: {what}")


def rewards_of(group: Sequence[SampleFacts]) -> Tensor:
    """[G], float64, the rewards of a group's samples."""
    return torch.tensor([sample.reward for sample in group], dtype=torch.float64)
