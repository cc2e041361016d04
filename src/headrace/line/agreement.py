"""Whether trainer and generator give the same numbers under the same weights.

Only tokens sampled by the very weights that are being trained are compared: tokens of staleness 0 in the step's
batch, and when those are few, tokens of the current weights that no step has consumed yet. Policy drift is
another thing and reported apart.
"""

from __future__ import annotations

from headrace.errors import RunError
from headrace.line.cell import Cell
from headrace.line.episodes import Episodes
from headrace.trainer import TokenStatistics
from headrace.types import Trajectory

PROBE_TOKENS = 256
"""Tokens that a step compares at least, as far as there are any."""


class Agreement:
    """The comparison of one step; `statistics` is merged into as gradients are taken.

    Args:
        limit: the largest mean difference that a run goes on with.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.statistics = TokenStatistics()

    def check(self, cell: Cell, episodes: Episodes, committed: set[int]) -> None:
        """Before the weights change: compare enough tokens of theirs, and stop the run when they disagree.

        Raises:
            RunError: the mean difference is above the limit.
        """
        if self.statistics.current < PROBE_TOKENS:
            self._rescore(cell, episodes, committed, PROBE_TOKENS - self.statistics.current)
        mean = self.statistics.logprob_diff_mean
        if mean is not None and mean > self.limit:
            raise RunError(
                f"step {cell.version + 1}: trainer and generator disagree by {mean:.3g} on average about "
                f"log-probs of the same weights (line.logprob_diff_limit = {self.limit:g})"
            )

    def _rescore(self, cell: Cell, episodes: Episodes, committed: set[int], wanted: int) -> None:
        """Score tokens that the current weights sampled and no step has consumed, about `wanted` of them."""
        chosen: list[Trajectory] = []
        for group in episodes.groups.values():
            for trajectory in group.samples:
                if wanted <= 0:
                    break
                if trajectory is None or group.id in committed or trajectory.mixed_kv:
                    continue
                current = trajectory.versions.count(cell.version)
                if current:
                    chosen.append(trajectory)
                    wanted -= current
        for trajectory, scored in zip(chosen, cell.rescore(chosen), strict=True):
            self.statistics.add_current(
                [
                    (logp, behaviour)
                    for logp, behaviour, version in zip(scored, *_sampled(trajectory), strict=True)
                    if version == cell.version
                ]
            )


def _sampled(trajectory: Trajectory) -> tuple[list[float], list[int]]:
    """Behaviour log-probs and versions of the sampled tokens."""
    pairs = zip(trajectory.logprobs, trajectory.versions, trajectory.sampled, strict=True)
    kept = [(logprob, version) for logprob, version, sampled in pairs if sampled]
    return [logprob for logprob, _ in kept], [version for _, version in kept]
