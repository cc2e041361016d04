"""When a run stops because its rollouts are not the policy's any more: pure limits on what is measured in each step.

In the model's own format trainer and generator compute the same numbers, and a mean difference above rounding is an
error. Quantised weights are another policy on purpose, close to the trained one: there the effective sample size is
what counts, since it says how much of the rollouts is left once the loss has corrected for the difference.

Invariant: what was seen in earlier steps is a value (`Memory`), so that a resumed run judges as one that never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from headrace.measures import Divergence

JUDGED_TOKENS = 512
"""Tokens over which the effective sample size is judged at least: those of a few steps where steps are small."""

PATIENCE = 2
"""Judgements in a row that stop a run. One token of an extreme ratio can spoil one, however many tokens it is over."""


@dataclass(slots=True)
class Memory:
    """What earlier steps have left: tokens not judged yet, and how many judgements in a row were below the limit."""

    recent: Divergence = field(default_factory=Divergence)
    below: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"recent": self.recent.to_dict(), "below": self.below}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(Divergence.from_dict(data["recent"]), data["below"])


def remember(memory: Memory, step: Divergence, ess_limit: float) -> Memory:
    """The memory after a step of quantised rollouts whose comparison is `step`."""
    seen = _merged(memory.recent, step)
    if seen.tokens < JUDGED_TOKENS:
        return Memory(seen, memory.below)
    return Memory(Divergence(), memory.below + 1 if _low(seen, ess_limit) else 0)


def quantised_problem(memory: Memory, step: Divergence, ess_limit: float) -> str | None:
    """What is wrong with quantised rollouts, and what to do about it, if this step is the one that says so."""
    after = remember(memory, step, ess_limit)
    if after.below <= memory.below or after.below < PATIENCE:
        return None
    judged = _merged(memory.recent, step)
    return (
        f"int8 rollouts no longer resemble the policy: an effective sample size of {judged.ess:.2f} over "
        f"{judged.tokens} tokens (line.mismatch_ess_limit = {ess_limit:g}); start a run with "
        'engine.weight_format = "float32" and the last checkpoint\'s folder as model.name, or lower the limit'
    )


def disagreement_problem(step: Divergence, limit: float) -> str | None:
    """What is wrong where trainer and generator compute in the same format, if anything is."""
    mean = step.difference_mean
    if mean is None or mean <= limit:
        return None
    return (
        f"trainer and generator disagree by {mean:.3g} on average about log-probs of the same weights "
        f"(line.logprob_diff_limit = {limit:g}): its rollouts are on record, so raise the limit to train on them, or "
        "begin a new run from the last checkpoint with engine.prepack = false"
    )


def _merged(one: Divergence, other: Divergence) -> Divergence:
    both = Divergence()
    both.merge(one)
    both.merge(other)
    return both


def _low(seen: Divergence, limit: float) -> bool:
    return seen.ess is not None and seen.ess < limit
