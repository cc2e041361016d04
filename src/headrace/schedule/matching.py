"""Which unit of work a free cell runs next: a pure function of what the line holds.

Invariants
* A cell never waits while something can run.
* A step whose groups are all committed is finished before anything else: the new weights make every later
  token fresher. A full micro-batch of gradient goes before decoding too.
* A smaller piece of gradient waits for company while there is something to decode, and is taken when there is
  not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """A short, bounded piece of computation on a cell."""

    DECODE = "decode"
    """A few engine steps."""
    GRADIENT = "gradient"
    """Forward and backward of one micro-batch of committed groups."""
    OPTIMIZER_STEP = "optimizer_step"
    """Clip, update the weights and publish them."""
    WAIT = "wait"
    """Nothing can run until an environment answers."""


@dataclass(frozen=True, slots=True)
class LineState:
    """What the line holds when a cell becomes free.

    Args:
        groups_per_step: groups of one optimizer step (B).
        committed: groups committed to the current step.
        pending_gradient_groups: committed groups whose gradient is still to be taken.
        pending_gradient_tokens: packed tokens of those groups.
        micro_batch_tokens: packed tokens of one gradient unit.
        decodable: sequences that the engine can advance now.
        waiting_on_environment: trajectories whose environment is answering; says what a `WAIT` waits for.

    Raises:
        ValueError: the counts contradict each other.
    """

    groups_per_step: int
    committed: int
    pending_gradient_groups: int
    pending_gradient_tokens: int
    micro_batch_tokens: int
    decodable: int
    waiting_on_environment: int

    def __post_init__(self) -> None:
        if not 0 <= self.pending_gradient_groups <= self.committed <= self.groups_per_step:
            raise ValueError(f"pending groups, committed groups and groups_per_step must not fall: {self}")
        if self.pending_gradient_tokens and not self.pending_gradient_groups:
            raise ValueError(f"pending tokens must belong to pending groups: {self}")
        if min(self.pending_gradient_tokens, self.decodable, self.waiting_on_environment) < 0:
            raise ValueError(f"counts must not be negative: {self}")
        if min(self.groups_per_step, self.micro_batch_tokens) < 1:
            raise ValueError(f"groups_per_step and micro_batch_tokens must be at least 1: {self}")

    @property
    def stalled(self) -> bool:
        """Whether the cell waits although no environment will answer: no amount of waiting would help."""
        return next_unit(self) is Unit.WAIT and self.waiting_on_environment == 0


def next_unit(state: LineState) -> Unit:
    """The unit that a free cell runs next (see the module's invariants)."""
    pending = state.pending_gradient_groups > 0
    full = state.committed == state.groups_per_step
    if full and not pending:
        return Unit.OPTIMIZER_STEP
    if pending and (full or state.pending_gradient_tokens >= state.micro_batch_tokens):
        return Unit.GRADIENT
    if state.decodable > 0:
        return Unit.DECODE
    if pending:
        return Unit.GRADIENT
    return Unit.WAIT
