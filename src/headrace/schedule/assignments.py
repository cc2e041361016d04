"""Which units are out, and which outcomes count: the rule of incarnations. Pure bookkeeping.

Invariants
* An outcome is taken once, and only while its assignment is open: what a cell finishes late, twice, or in an
  incarnation that was given up is dropped and counted.
* Numbers are never used again.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.schedule.units import Assignment, Outcome, Unit


class Assignments:
    """The open assignments of all cells.

    Attributes:
        dropped: outcomes that came too late, twice, or from an incarnation that is gone.
    """

    def __init__(self) -> None:
        self._open: dict[int, Assignment] = {}
        self._next = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Assignment]:
        return iter(self._open.values())

    def open(self, cell: str, incarnation: int, unit: Unit) -> Assignment:
        """Give a unit to an incarnation of a cell."""
        assignment = Assignment(self._next, cell, incarnation, unit)
        self._next += 1
        self._open[assignment.number] = assignment
        return assignment

    def take(self, outcome: Outcome) -> Assignment | None:
        """Close the assignment that an outcome answers; None if it is not to be used."""
        assignment = self._open.get(outcome.number)
        if assignment is None or (assignment.cell, assignment.incarnation) != (
            outcome.cell,
            outcome.incarnation,
        ):
            self.dropped += 1
            return None
        return self._open.pop(outcome.number)

    def close_cell(self, cell: str, incarnation: int) -> list[Assignment]:
        """Give up everything that this incarnation was told to run."""
        gone = [a for a in self if (a.cell, a.incarnation) == (cell, incarnation)]
        for assignment in gone:
            del self._open[assignment.number]
        return gone
