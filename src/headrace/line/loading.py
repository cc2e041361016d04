"""Puts into a planned unit what its cell needs to run it: trajectories, settings, requests.

Invariant: recorded gradients and steps are run again with the settings that were in force for them, since both live
units and recorded ones take them from the state (`RunState.algorithm`, `.trainer`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace.algorithms import Algorithm, load_algorithm
from headrace.config import AlgorithmConfig
from headrace.kernels import kernel_fingerprint
from headrace.line.rollouts import Rollouts
from headrace.measures import SampleFacts, facts_of
from headrace.runs.state import GroupState, RunState
from headrace.schedule import Bucket
from headrace.schedule.units import CellView, Decode, Gradient, OptimizerStep, Score, StepSettings, Unit
from headrace.types import Trajectory


class Loader:
    """Loads units from a state.

    Args:
        folder: the run's, which holds the algorithms it has used.

    Attributes:
        fingerprint: of the kernels that compute gradients here.
    """

    def __init__(self, state: RunState, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.fingerprint = kernel_fingerprint()
        self._loaded: tuple[tuple[AlgorithmConfig, Path | None], Algorithm] | None = None

    @property
    def _algorithm(self) -> Algorithm:
        assert self.state.algorithm is not None
        key = (self.state.algorithm, self._file)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = key, load_algorithm(*key)
        return self._loaded[1]

    @property
    def _file(self) -> Path | None:
        """The kept copy of the user's algorithm."""
        kept = self.state.algorithm_file
        return None if kept is None else self.folder / kept

    @property
    def whole_batch(self) -> bool:
        """Whether gradients need all B groups of the step."""
        return self._algorithm.scope == "batch"

    def replaceable(self, group: GroupState) -> bool:
        """Whether dynamic sampling may close a finished group: its algorithm finds no advantage in it."""
        algorithm = self._algorithm
        return algorithm.settings.zero_advantage == "replace" and algorithm.teaches_nothing(facts(group))

    def loaded(self, unit: Unit, view: CellView, rollouts: Rollouts) -> Unit:
        """The unit, complete."""
        match unit:
            case Decode():
                return rollouts.loaded(unit, view.name, view.incarnation)
            case Gradient():
                return self.gradient(unit)
            case Score():
                return replace(unit, trajectories=tuple(self._unscored(unit)))
            case OptimizerStep():
                return self.step(unit)
        return unit

    def gradient(self, unit: Gradient) -> Gradient:
        """With the groups' trajectories, and the settings of the step."""
        state = self.state
        assert state.config is not None
        assert state.admission is not None
        batch = None
        if self.whole_batch:
            batch = {group: facts(state.groups[group]) for group in state.admission.committed}
        return replace(
            unit,
            max_staleness=state.config.line.max_staleness,
            members=tuple(tuple(state.groups[group].trajectories) for group in unit.groups),
            batch=batch,
            settings=self._settings,
        )

    def step(self, unit: OptimizerStep) -> OptimizerStep:
        """With the settings of the step."""
        return replace(unit, settings=self._settings)

    @property
    def _settings(self) -> StepSettings:
        state = self.state
        assert state.config is not None
        assert state.algorithm is not None
        assert state.trainer is not None
        file = None if self._file is None else str(self._file)
        return StepSettings(state.algorithm, file, state.trainer, state.config.line.steps)

    def _unscored(self, unit: Score) -> list[Trajectory]:
        """Rows with about so many tokens of the current weights that no gradient compares."""
        state = self.state
        compared = {
            sample.id
            for contribution in state.contributions.values()
            for gradient in contribution.gradients
            for sample in gradient.samples
            if sample.bucket is Bucket.TRAINED
        }
        chosen: list[Trajectory] = []
        wanted = unit.tokens
        for attempt in state.attempts():
            for row in attempt.trajectory.rows:
                if wanted <= 0:
                    return chosen
                current = row.versions.count(unit.version)
                if current and row.id not in compared and not row.mixed_kv:
                    chosen.append(row)
                    wanted -= current
        return chosen


def facts(group: GroupState) -> list[SampleFacts]:
    """What an algorithm's advantages may look at."""
    return facts_of(group.trajectories)
