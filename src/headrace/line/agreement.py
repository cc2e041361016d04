"""Whether rollouts come from the policy that is trained: trainer and generator under the same weights.

Only tokens sampled by the very weights that are being trained are compared: tokens of staleness 0 whose gradient the
step takes, and when those are few, others of the current weights. Policy drift is another thing and reported apart.

In the model's own format both compute the same numbers, and a mean difference above rounding is an error. Quantised
weights are another policy on purpose, close to the trained one: there the effective sample size is what counts, since
it says how much of the rollouts is left once the loss has corrected for the difference.
"""

from __future__ import annotations

import torch

from headrace.config import Config
from headrace.line.cell import Cell
from headrace.line.episodes import Episodes
from headrace.trainer import Divergence
from headrace.types import Trajectory

PROBE_TOKENS = 256
"""Tokens that a step compares at least, as far as there are any."""

JUDGED_TOKENS = 512
"""Tokens over which the effective sample size is judged at least: those of a few steps where steps are small."""

PATIENCE = 2
"""Judgements in a row that stop a run. One token of an extreme ratio can spoil one, however many tokens it is over."""


class Agreement:
    """The comparison of each step, and the limits that stop a run.

    Attributes:
        mismatch: the comparison of the step that is under way; gradients add to it.
    """

    def __init__(self, config: Config) -> None:
        self.quantised = config.engine.weight_format != "float32"
        self.difference_limit = config.line.logprob_diff_limit
        self.ess_limit = config.line.mismatch_ess_limit
        self.mismatch = Divergence()
        self._recent = Divergence()
        self._below = 0

    def complete(self, cell: Cell, episodes: Episodes) -> None:
        """Before the weights change: compare enough tokens of theirs."""
        if self.mismatch.tokens < PROBE_TOKENS:
            self._rescore(cell, episodes, PROBE_TOKENS - self.mismatch.tokens)

    def judge(self) -> str | None:
        """What is wrong with the step's comparison and what to do about it, if a limit is passed; once per step."""
        return self._quantised_problem() if self.quantised else self._problem()

    def take(self) -> Divergence:
        """The step's comparison; the next step starts with none."""
        taken, self.mismatch = self.mismatch, Divergence()
        return taken

    def _problem(self) -> str | None:
        mean = self.mismatch.difference_mean
        if mean is None or mean <= self.difference_limit:
            return None
        return (
            f"trainer and generator disagree by {mean:.3g} on average about log-probs of the same weights "
            f"(line.logprob_diff_limit = {self.difference_limit:g}); try engine.prepack = false, or raise the limit"
        )

    def _quantised_problem(self) -> str | None:
        self._recent.merge(self.mismatch)
        if self._recent.tokens < JUDGED_TOKENS:
            return None
        judged, self._recent = self._recent, Divergence()
        ess = judged.ess
        assert ess is not None
        self._below = 0 if ess >= self.ess_limit else self._below + 1
        if self._below < PATIENCE:
            return None
        return (
            f"int8 rollouts no longer resemble the policy: an effective sample size of {ess:.2f} over {judged.tokens} "
            f"tokens (line.mismatch_ess_limit = {self.ess_limit:g}); start a run with "
            'engine.weight_format = "float32" and the last checkpoint\'s folder as model.name, or lower the limit'
        )

    def _rescore(self, cell: Cell, episodes: Episodes, wanted: int) -> None:
        """Score tokens that the current weights sampled and no gradient was taken of, about `wanted` of them."""
        compared = cell.trainer.taken()
        chosen: list[Trajectory] = []
        held = (t for group in episodes.groups.values() for t in group.samples if t is not None)
        for row in (row for trajectory in held for row in trajectory.rows):
            if wanted <= 0:
                break
            current = row.versions.count(cell.version)
            if current and row.id not in compared and not row.mixed_kv:
                chosen.append(row)
                wanted -= current
        for trajectory, scored in zip(chosen, cell.rescore(chosen), strict=True):
            behaviour, versions = _sampled(trajectory)
            fresh = versions == cell.version
            self.mismatch.add(torch.tensor(scored, dtype=torch.float64)[fresh], behaviour[fresh])


def _sampled(trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Behaviour log-probs and versions of the sampled tokens, both [T]."""
    sampled = torch.tensor(trajectory.sampled)
    logprobs = torch.tensor(trajectory.logprobs, dtype=torch.float64)
    return logprobs[sampled], torch.tensor(trajectory.versions)[sampled]
