"""Which groups may start, and which finished group a step may take: the rule that bounds staleness.

Words: version v counts completed steps, B is the groups of one step, η is `max_staleness`. A group is
*outstanding* from its admission until a step consumes it or it is closed. Its *deadline* is the version at
its admission plus η: the last version at which it may be trained, so that no token in it is staler than η.

Invariants (U(d) is the number of uncommitted outstanding groups with deadline ≤ d, c the number committed)
* U(d) ≤ (B − c) + (d − v)·B for every d ≥ v: what is due by version d fits into the places left until then.
  - `admit` keeps it: a new group counts only for d ≥ v + η, where (η + 1)·B outstanding groups fit exactly.
  - `commit` refuses what would break it. A commit of the earliest deadline e never does: both sides fall by
    one for d ≥ e, and U(d) = 0 for d < e. So some outstanding group may always be committed.
  - `complete_step` keeps it: with c = B the right side is (d − v)·B before and after. And U(v) = 0 before it,
    so nothing is late.
* A step consumes exactly B groups. While c < B and nothing uncommitted is outstanding, consumed + outstanding
  is v·B + c < steps·B and outstanding is c < B, so another group may start: a closed group is replaced, and
  no step ever starves or has to make do with fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self


class Admission:
    """The admission and commit rule of one run. Pure bookkeeping: no clock, no I/O.

    Args:
        steps: optimizer steps of the run, at least 1.
        groups_per_step: groups of one step (B), at least 1.
        max_staleness: the bound η on the staleness of a trained token, at least 0.

    Attributes:
        version: completed steps, which is the current policy version.
        consumed: groups that completed steps took.
        outstanding: group id -> deadline; committed groups are in it until their step completes.
        committed: ids committed to the current step, in the order of their commits.
    """

    def __init__(self, steps: int, groups_per_step: int, max_staleness: int) -> None:
        if steps < 1 or groups_per_step < 1 or max_staleness < 0:
            raise ValueError(
                f"steps and groups_per_step must be at least 1 and max_staleness at least 0, "
                f"not {steps}, {groups_per_step} and {max_staleness}"
            )
        self.steps = steps
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.version = 0
        self.consumed = 0
        self.outstanding: dict[int, int] = {}
        self.committed: list[int] = []

    @property
    def capacity(self) -> int:
        """The most groups that may be outstanding at once, (η + 1)·B."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def finished(self) -> bool:
        """Whether every step is complete."""
        return self.version == self.steps

    @property
    def step_ready(self) -> bool:
        """Whether the current step has all of its B groups."""
        return len(self.committed) == self.groups_per_step

    def can_admit(self) -> bool:
        """Whether another group may start now."""
        outstanding = len(self.outstanding)
        return outstanding < self.capacity and self.consumed + outstanding < self.steps * self.groups_per_step

    def admit(self, group_id: int) -> int:
        """Start a group and return its deadline.

        Raises:
            RuntimeError: no group may start now, or this one is outstanding already.
        """
        if group_id in self.outstanding:
            raise RuntimeError(f"group {group_id} is outstanding already")
        if not self.can_admit():
            raise RuntimeError(
                f"group {group_id} may not start: {len(self.outstanding)} groups are outstanding (at most "
                f"{self.capacity}) and {self.consumed} consumed of {self.steps * self.groups_per_step}"
            )
        deadline = self.version + self.max_staleness
        self.outstanding[group_id] = deadline
        return deadline

    def may_commit(self, group_id: int) -> bool:
        """Whether the current step may take this group without making another one late.

        False for a group that is committed already and when the step is full.

        Raises:
            RuntimeError: the group is not outstanding.
        """
        deadline = self._deadline(group_id)
        if self.step_ready or group_id in self.committed:
            return False
        places = self.groups_per_step - len(self.committed) - 1
        waiting = [d for g, d in self.outstanding.items() if g not in self.committed]
        # For d ≥ deadline this group is one less on both sides, so only the versions before it can break.
        return all(
            sum(other <= d for other in waiting) <= places + (d - self.version) * self.groups_per_step
            for d in range(self.version, deadline)
        )

    def next_commit(self, ready: Iterable[int]) -> int | None:
        """The ready group to commit next: earliest deadline, then lowest id. None when the step must wait.

        Args:
            ready: outstanding groups that are complete and rewarded; committed ones among them are skipped.

        Raises:
            RuntimeError: one of them is not outstanding.
        """
        candidates = [(self._deadline(g), g) for g in ready if g not in self.committed]
        if not candidates:
            return None
        # A later deadline is bound by every version that an earlier one is, so no other can be allowed.
        _, first = min(candidates)
        return first if self.may_commit(first) else None

    def commit(self, group_id: int) -> None:
        """Give the group one of the current step's places, for good.

        Raises:
            RuntimeError: `may_commit` refuses it.
        """
        if not self.may_commit(group_id):
            raise RuntimeError(
                f"group {group_id} may not be committed to step {self.version}: {len(self.committed)} of "
                f"{self.groups_per_step} places are taken and groups {self.waited_for()} are due first"
            )
        self.committed.append(group_id)

    def close(self, group_id: int) -> None:
        """Give up a group that was dropped or failed; another one may start in its place.

        Raises:
            RuntimeError: the group is not outstanding, or is committed (its gradient may be taken already).
        """
        self._deadline(group_id)
        if group_id in self.committed:
            raise RuntimeError(f"group {group_id} is committed to step {self.version} and may not be closed")
        del self.outstanding[group_id]

    def complete_step(self) -> list[int]:
        """Consume the committed groups, advance the version, and return their ids in commit order.

        Raises:
            RuntimeError: the step does not have all of its groups.
        """
        if not self.step_ready:
            raise RuntimeError(
                f"step {self.version} has {len(self.committed)} of its {self.groups_per_step} groups"
            )
        done, self.committed = self.committed, []
        for group_id in done:
            del self.outstanding[group_id]
        self.consumed += len(done)
        self.version += 1
        return done

    def waited_for(self) -> list[int]:
        """The uncommitted groups with the earliest deadline, by id: what a stuck step waits for."""
        waiting = {g: d for g, d in self.outstanding.items() if g not in self.committed}
        earliest = min(waiting.values(), default=0)
        return sorted(g for g, d in waiting.items() if d == earliest)

    def slack(self, group_id: int) -> int:
        """Steps that may still complete before the one that must take this group; 0 when it is due now."""
        return self._deadline(group_id) - self.version

    def overdue(self, group_id: int) -> bool:
        """Whether the current step is the last one that may take this group."""
        return self.slack(group_id) == 0

    def state_dict(self) -> dict[str, Any]:
        """The whole state as plain JSON data."""
        return {
            "steps": self.steps,
            "groups_per_step": self.groups_per_step,
            "max_staleness": self.max_staleness,
            "version": self.version,
            "consumed": self.consumed,
            "outstanding": [[group_id, deadline] for group_id, deadline in self.outstanding.items()],
            "committed": list(self.committed),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state is malformed, or breaks an invariant and so could break the bound.
        """
        try:
            numbers = [state[k] for k in ("steps", "groups_per_step", "max_staleness", "version", "consumed")]
            pairs = [(group_id, deadline) for group_id, deadline in state["outstanding"]]
            committed = list(state["committed"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"malformed admission state: {error!r}") from None
        if not all(type(n) is int for n in [*numbers, *committed, *(n for pair in pairs for n in pair)]):
            raise ValueError("malformed admission state: every entry must be an integer")
        admission = cls(*numbers[:3])
        admission.version, admission.consumed = numbers[3:]
        admission.outstanding = dict(pairs)
        admission.committed = committed
        if len(admission.outstanding) != len(pairs):
            raise ValueError("inconsistent admission state: a group is outstanding twice")
        admission._check()
        return admission

    def _deadline(self, group_id: int) -> int:
        try:
            return self.outstanding[group_id]
        except KeyError:
            raise RuntimeError(f"group {group_id} is not outstanding") from None

    def _check(self) -> None:
        """Raise a `ValueError` that names the first broken invariant."""
        v, b = self.version, self.groups_per_step
        deadlines = self.outstanding.values()
        uncommitted = [d for g, d in self.outstanding.items() if g not in self.committed]
        free = b - len(self.committed)
        rules = {
            "version lies in 0..steps": 0 <= v <= self.steps,
            "every step consumed its groups": self.consumed == v * b,
            "deadlines lie in version..version + max_staleness": all(
                v <= d <= v + self.max_staleness for d in deadlines
            ),
            "committed groups are outstanding, once each": len(set(self.committed)) == len(self.committed)
            and set(self.committed) <= self.outstanding.keys(),
            "a step has no more than its places": free >= 0,
            "no more groups are outstanding than admission allows": len(deadlines) <= self.capacity
            and self.consumed + len(deadlines) <= self.steps * b,
            "every deadline can still be met": all(
                sum(other <= d for other in uncommitted) <= free + (d - v) * b
                for d in range(v, v + self.max_staleness + 1)
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"inconsistent admission state: it is not so that {rule}")
