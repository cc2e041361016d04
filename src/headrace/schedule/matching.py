"""Which unit of work a free cell runs next, and whether another group is worth starting: pure functions.

Invariants
* A cell never waits while something can run.
* A step whose groups are all committed is finished before anything else: the new weights make every later
  token fresher. A full micro-batch of gradient goes before decoding too.
* Running ahead of the trainer is bought with staleness, so it is done only for throughput: when the step has all
  the groups it needs, another one starts only to make an inefficient generator efficient or an idle cell busy.
* A smaller piece of gradient waits for company while there is something to decode, and is taken when there is
  not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from statistics import linear_regression, median


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


def worth_starting(
    *, groups_per_step: int, committed: int, uncommitted: int, decodable: int, cost: DecodeCost
) -> bool:
    """Whether starting another group now helps, given that admission allows it.

    A token sampled ahead saves its share of an engine step's fixed cost, fixed / n at n sequences a step. If the
    weights change before its sequence ends, it is computed once more under the new ones, which costs about
    `per_sequence`. So running ahead pays while steps have fewer than n = fixed / per_sequence sequences, on
    average and now.

    Args:
        groups_per_step: groups of one optimizer step (B).
        committed: groups committed to the current step.
        uncommitted: outstanding groups that are not.
        decodable: sequences that the engine can advance now.
        cost: what an engine step costs on this cell.
    """
    if committed == groups_per_step:
        return False  # the weights are about to change, and what starts after that is fresher
    if committed + uncommitted < groups_per_step or decodable == 0:
        return True
    return max(decodable, cost.mean_sequences) < cost.efficient_sequences


class DecodeCost:
    """What one engine step of n decoding sequences costs: seconds = fixed + per_sequence · n, from measurements.

    A line through the medians of the latest measurements, taken between powers of two of n: a step that was held up
    by something else on the machine does not count.

    Args:
        latest: measurements kept between two powers of two.
        memory: steps after which an old n counts 1/e in `mean_sequences`.
    """

    def __init__(self, latest: int = 25, memory: float = 200.0) -> None:
        self._latest = latest
        self._keep = 1.0 - 1.0 / memory
        self._measured: dict[int, deque[tuple[int, float]]] = {}
        self._count = self._sequences = 0.0

    def add(self, sequences: int, seconds: float) -> None:
        """Count one engine step that only decoded."""
        self._count = self._keep * self._count + 1
        self._sequences = self._keep * self._sequences + sequences
        bucket = self._measured.setdefault(sequences.bit_length(), deque(maxlen=self._latest))
        bucket.append((sequences, seconds))

    @property
    def mean_sequences(self) -> float:
        """Decoding sequences per engine step; 0 before the first one."""
        return self._sequences / self._count if self._count else 0.0

    @property
    def efficient_sequences(self) -> float:
        """The n at which half of a step's time is the fixed part: below it, more sequences are nearly free.

        0 while the measured n lie too close together to tell; infinite where more sequences cost nothing.
        """
        ns = [median(n for n, _ in bucket) for bucket in self._measured.values()]
        times = [median(seconds for _, seconds in bucket) for bucket in self._measured.values()]
        if not ns or max(ns) < 2 * min(ns):
            return 0.0
        per_sequence, fixed = linear_regression(ns, times)
        if fixed <= 0:
            return 0.0
        return fixed / per_sequence if per_sequence > 0 else float("inf")
