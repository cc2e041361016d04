"""Recorded units run again: how weights and gradient sums come about from a journal.

Invariants
* Gradients and steps are taken in the recorded order, partition and association, with the recorded settings and number
  of threads, so that on the same kernels the weights are the same bits; their digests say so.
* Nothing of it changes the state: outcomes are compared with what is recorded, never applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.line.cell import LocalCell
from headrace.line.loading import Loader
from headrace.runs.events import StepTaken
from headrace.runs.state import Contribution, RunState
from headrace.schedule.units import POLICY, Contribute, Gradient, OptimizerStep, PolicyVersion, Stepped


@dataclass(frozen=True, slots=True)
class RetakenStep:
    """A step's digests: the recorded one, and that of the weights that were computed again.

    `checkable` is false where other kernels (instruction set, torch, build) took the recorded one.
    """

    step: int
    recorded: str
    retaken: str
    checkable: bool = True

    @property
    def equal(self) -> bool:
        return self.recorded == self.retaken


class Retake:
    """Runs a state's recorded gradients and steps on a cell.

    Args:
        folder: the run's, which holds the algorithms it has used.

    Attributes:
        steps: those that were retaken.
    """

    def __init__(self, state: RunState, cell: LocalCell, folder: Path) -> None:
        self.state, self.cell = state, cell
        self.loader = Loader(state, folder)
        self.steps: list[RetakenStep] = []

    def contributions(self) -> None:
        """Take the gradients of the step under way, as its contributions say."""
        for _, contribution in sorted(self.state.contributions.items()):
            self._contribution(contribution)

    def step(self, event: StepTaken, opened: dict[int, str]) -> RetakenStep:
        """Take a recorded step, just before the state does.

        Args:
            opened: the fingerprint of the kernels of each of its contributions.
        """
        self.contributions()
        numbers = tuple(sorted(self.state.contributions))
        unit = self.loader.step(OptimizerStep(self.state.version, numbers))
        stepped: Stepped = self.cell.run(unit, event.threads)
        same = stepped.digest == event.digest
        weights_id = event.weights_id if same else stepped.weights_id
        if not event.updated:
            weights_id = self.cell.policy.weights_id
        # Other bits are other weights: KV that was made with the recorded ones is not theirs.
        self.cell.policy = PolicyVersion(POLICY, event.step, weights_id)
        checkable = all(print_ == self.loader.fingerprint for print_ in opened.values())
        self.steps.append(RetakenStep(event.step, event.digest, stepped.digest, checkable))
        return self.steps[-1]

    def _contribution(self, contribution: Contribution) -> None:
        for gradient in contribution.gradients:
            unit = Gradient(gradient.groups, self.state.version, contribution.number)
            self.cell.run(self.loader.gradient(unit), gradient.threads)
        if contribution.received and contribution.gradients:
            self.cell.run(Contribute(contribution.number))
