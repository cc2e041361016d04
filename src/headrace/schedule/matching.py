"""Which unit of work each free cell runs next, and whether another group is worth starting: pure functions.

Invariants
* A cell never waits while something can run on it.
* A step whose groups are all committed is finished before anything else: the new weights make every later
  token fresher. A full micro-batch of gradient goes before decoding too.
* A cell draws only for groups admitted at its own version or an earlier one (the version fence), and takes gradients
  only at exactly the version that is trained.
* Running ahead of the trainer is bought with staleness, so it is done only for throughput: when the step has all
  the groups it needs, another one starts only to make an inefficient generator efficient or an idle cell busy.
* A smaller piece of gradient waits for company while there is something to decode, and is taken when there is
  not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import linear_regression, median
from typing import NamedTuple, Protocol

from headrace.schedule.units import (
    CellView,
    Contribute,
    Decode,
    Gradient,
    OptimizerStep,
    PolicyVersion,
    Publish,
    Score,
    Unit,
    UnitKind,
)
from headrace.types import TrajectoryId

PROBE_TOKENS = 256
"""Tokens that a step compares between trainer and generator at least, as far as there are any."""


class PendingGroup(NamedTuple):
    """A committed group without a gradient, and its tokens in a packed row."""

    id: int
    tokens: int


class Wanted(NamedTuple):
    """A trajectory that no cell advances; `admitted_version` is its group's."""

    id: TrajectoryId
    admitted_version: int


class OpenContribution(NamedTuple):
    """A contribution of the step under way; `received` once the optimizer's cell holds it."""

    number: int
    cell: str
    incarnation: int
    received: bool


class LineCounts(Protocol):
    """What the planner reads of a line."""

    @property
    def policy(self) -> PolicyVersion:
        """The version that is trained."""

    @property
    def groups_per_step(self) -> int:
        """Groups of one optimizer step (B)."""

    @property
    def committed(self) -> int:
        """Groups committed to the step under way."""

    @property
    def pending(self) -> Sequence[PendingGroup]:
        """Committed groups whose gradient is neither taken nor being taken, the oldest first."""

    @property
    def gradients_out(self) -> int:
        """Gradient units that are out."""

    @property
    def contributions(self) -> Sequence[OpenContribution]:
        """Of the step under way, by number."""

    @property
    def probed(self) -> bool:
        """Whether the step's comparison of trainer and generator is complete."""

    @property
    def compared_tokens(self) -> int:
        """Tokens that the step's gradients have compared."""

    @property
    def wanted(self) -> Sequence[Wanted]:
        """Trajectories to decode that no cell has, the most urgent first."""

    @property
    def micro_batch_tokens(self) -> int:
        """Packed tokens of one Gradient unit."""

    @property
    def decode_steps(self) -> int:
        """Engine steps of one Decode unit."""

    @property
    def whole_batch(self) -> bool:
        """Whether gradients wait until all B groups are committed: their advantages need them all."""


def plan(counts: LineCounts, cells: Sequence[CellView]) -> list[tuple[CellView, Unit]]:
    """The next unit of every cell that can take one and has something to run (see the module's invariants)."""
    round_ = _Round(counts, cells)
    return [(cell, unit) for cell in cells if (unit := round_.unit(cell)) is not None]


class _Round:
    """One call of `plan`: what is still to be given out."""

    def __init__(self, counts: LineCounts, cells: Sequence[CellView]) -> None:
        self.counts = counts
        self.version = counts.policy.number
        self.pending = list(counts.pending)
        self.wanted = list(counts.wanted)
        self.out = {kind for cell in cells for kind in cell.busy}
        self.deciders = sum(len(cell.busy) < cell.depth for cell in cells)
        self.full = counts.committed == counts.groups_per_step
        self.gradients_out = counts.gradients_out

    def unit(self, cell: CellView) -> Unit | None:
        if len(cell.busy) >= cell.depth:
            return None
        self.deciders -= 1
        if cell.busy:
            return self._decode(cell) if cell.busy[-1] is UnitKind.DECODE else None
        if cell.version < self.version:
            return Publish(self.counts.policy)
        current = cell.version == self.version
        if self.full and not self.pending and not self.gradients_out and current:
            unit = self._finish(cell)
            if unit is not None:
                return unit
        takes_gradients = current and self.pending and (self.full or not self.counts.whole_batch)
        enough = sum(group.tokens for group in self.pending) >= self.counts.micro_batch_tokens
        if takes_gradients and (self.full or enough):
            return self._gradient(cell)
        return self._decode(cell) or (self._gradient(cell) if takes_gradients else None)

    def _finish(self, cell: CellView) -> Unit | None:
        """What this cell can do for a step whose gradients are all taken."""
        if not self.counts.probed:
            if UnitKind.SCORE not in self.out:
                self.out.add(UnitKind.SCORE)
                return Score(self.version, max(0, PROBE_TOKENS - self.counts.compared_tokens))
            return None
        for contribution in self.counts.contributions:
            own = (contribution.cell, contribution.incarnation) == (cell.name, cell.incarnation)
            if own and not contribution.received:
                return Contribute(contribution.number)
        complete = all(contribution.received for contribution in self.counts.contributions)
        if cell.optimizer and complete:
            return OptimizerStep(self.version, tuple(c.number for c in self.counts.contributions))
        return None

    def _gradient(self, cell: CellView) -> Gradient:
        """The oldest groups, about one micro-batch of them."""
        taken, tokens = 0, 0
        for group in self.pending:
            if taken and tokens + group.tokens > self.counts.micro_batch_tokens:
                break
            taken, tokens = taken + 1, tokens + group.tokens
        groups, self.pending = self.pending[:taken], self.pending[taken:]
        self.gradients_out += 1
        return Gradient(tuple(group.id for group in groups), self.version, cell.contribution)

    def _decode(self, cell: CellView) -> Decode | None:
        """What the cell holds, and its share of what nobody has."""
        if UnitKind.OPTIMIZER_STEP in self.out and cell.optimizer:
            return None
        allowed = [wanted for wanted in self.wanted if wanted.admitted_version <= cell.version]
        share = allowed[: -(-len(allowed) // (self.deciders + 1))]
        if not share and not cell.unfinished:
            return None
        self.wanted = [wanted for wanted in self.wanted if wanted not in share]
        return Decode(tuple(wanted.id for wanted in share), self.counts.decode_steps)


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
