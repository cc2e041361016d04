"""What the planner reads of a line (`schedule.LineCounts`), from its state and from what is out at the cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import Config
from headrace.runs.state import RunState
from headrace.schedule import Assignments
from headrace.schedule.matching import OpenContribution, PendingGroup, Wanted
from headrace.schedule.units import Gradient, PolicyVersion


@dataclass(frozen=True, slots=True)
class Counts:
    """The line at one moment; see `schedule.LineCounts` for what each is."""

    policy: PolicyVersion
    groups_per_step: int
    committed: int
    pending: Sequence[PendingGroup]
    gradients_out: int
    contributions: Sequence[OpenContribution]
    probed: bool
    compared_tokens: int
    wanted: Sequence[Wanted]
    micro_batch_tokens: int
    decode_steps: int
    whole_batch: bool

    @classmethod
    def of(
        cls,
        state: RunState,
        config: Config,
        wanted: Sequence[Wanted],
        assignments: Assignments,
        whole_batch: bool,
    ) -> Counts:
        assert state.admission is not None
        assert state.trainer is not None
        gradients = [a.unit for a in assignments if isinstance(a.unit, Gradient)]
        out = {group for gradient in gradients for group in gradient.groups}
        return cls(
            state.policy,
            config.line.groups_per_step,
            len(state.admission.committed),
            [PendingGroup(g, state.groups[g].packed_tokens) for g in state.pending if g not in out],
            len(gradients),
            [
                OpenContribution(c.number, c.cell, c.incarnation, c.received)
                for _, c in sorted(state.contributions.items())
            ],
            state.probe is not None,
            sum(g.statistics.mismatch.tokens for c in state.contributions.values() for g in c.gradients),
            wanted,
            state.trainer.micro_batch_tokens,
            config.line.decode_steps,
            whole_batch,
        )
