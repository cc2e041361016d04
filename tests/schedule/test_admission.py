"""The staleness bound against an adversary who chooses every completion, failure, commit and restart."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.schedule import Admission

BOUNDS = [0, 1, 2, 4]
adversarial = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow]
)


def fits(admission: Admission, committed: list[int]) -> bool:
    """DESIGN's rule, transcribed: for every d ≥ v the groups due by d fit into the places left until then."""
    v, b, c = admission.version, admission.groups_per_step, len(committed)
    due = [d for g, d in admission.outstanding.items() if g not in committed]
    return c <= b and all(sum(x <= d for x in due) <= (b - c) + (d - v) * b for d in range(v, v + 50))


class World:
    """What happens around an `Admission`, with the properties checked after every event."""

    def __init__(self, steps: int, groups_per_step: int, max_staleness: int) -> None:
        self.admission = Admission(steps, groups_per_step, max_staleness)
        self.admitted: dict[int, int] = {}
        self.ready: set[int] = set()
        self.consumed: list[int] = []
        self.staleness: list[int] = []
        self.restarts = 0

    @property
    def unfinished(self) -> list[int]:
        return [g for g in self.admission.outstanding if g not in self.ready]

    def admit(self) -> None:
        group_id = len(self.admitted)
        self.admitted[group_id] = self.admission.version
        assert self.admission.admit(group_id) == self.admission.version + self.admission.max_staleness

    def finish(self, group_id: int) -> None:
        self.ready.add(group_id)

    def close(self, group_id: int) -> None:
        self.admission.close(group_id)
        self.ready.discard(group_id)

    def complete_step(self) -> None:
        version = self.admission.version
        for group_id in self.admission.complete_step():
            self.consumed.append(group_id)
            self.ready.remove(group_id)
            self.staleness.append(version - self.admitted[group_id])
        assert self.admission.version == version + 1

    def restart(self) -> None:
        state = self.admission.state_dict()
        self.admission = Admission.from_state(json.loads(json.dumps(state)))
        assert self.admission.state_dict() == state
        self.restarts += 1

    def committable(self) -> list[int]:
        return [g for g in sorted(self.ready) if self.admission.may_commit(g)]

    def check(self) -> None:
        admission = self.admission
        bound, b = admission.max_staleness, admission.groups_per_step
        assert all(s <= bound for s in self.staleness), "trained above the bound"
        assert len(set(self.consumed)) == len(self.consumed) == admission.consumed == admission.version * b
        assert len(admission.outstanding) <= (bound + 1) * b
        assert admission.consumed + len(admission.outstanding) <= admission.steps * b
        assert fits(admission, admission.committed)
        uncommitted = [g for g in admission.outstanding if g not in admission.committed]
        for group_id in uncommitted:
            allowed = not admission.step_ready and fits(admission, [*admission.committed, group_id])
            assert admission.may_commit(group_id) == allowed
            assert 0 <= admission.slack(group_id) <= bound
        waited_for = admission.waited_for()
        if uncommitted and not admission.step_ready:
            # Never stuck: the earliest deadline may always be committed, so it is ready or waited for.
            assert waited_for
            assert all(admission.may_commit(g) for g in waited_for)
            choice = admission.next_commit(self.ready)
            if choice is None:
                assert not self.committable()
                assert not self.ready.intersection(waited_for)
            else:
                assert choice in self.committable()
                assert choice == min(self.committable(), key=lambda g: (admission.outstanding[g], g))
        if not uncommitted and not admission.step_ready and not admission.finished:
            assert admission.can_admit(), "the step starves"


def drive(
    world: World, choose: Callable[[list[str]], str], pick: Callable[[list[int]], int], closures: int
) -> None:
    """Run to the end: `choose` names one of the possible events, `pick` the group it happens to."""
    restart_next = True
    while not world.admission.finished:
        admission = world.admission
        uncommitted = [g for g in admission.outstanding if g not in admission.committed]
        events = {
            "admit": admission.can_admit(),
            "finish": bool(world.unfinished),
            "commit": bool(world.committable()),
            "commit_next": admission.next_commit(world.ready) is not None,
            "step": admission.step_ready,
            "close": bool(uncommitted) and closures > 0,
            "restart": restart_next,
        }
        possible = [name for name, now in events.items() if now]
        assert set(possible) - {"restart", "close"}, "the line is stuck"
        event = choose(possible)
        restart_next = event != "restart"
        if event == "admit":
            world.admit()
        elif event == "finish":
            world.finish(pick(world.unfinished))
        elif event == "commit":
            admission.commit(pick(world.committable()))
        elif event == "commit_next":
            choice = admission.next_commit(world.ready)
            assert choice is not None
            admission.commit(choice)
        elif event == "step":
            world.complete_step()
        elif event == "close":
            world.close(pick(uncommitted))
            closures -= 1
        else:
            world.restart()
        world.check()


@pytest.mark.parametrize("max_staleness", BOUNDS)
@adversarial
@given(data=st.data(), groups_per_step=st.integers(1, 5), steps=st.integers(1, 6), closures=st.integers(0, 6))
def test_adversary_never_breaks_the_bound_or_stops_the_line(
    data: st.DataObject, max_staleness: int, groups_per_step: int, steps: int, closures: int
) -> None:
    world = World(steps, groups_per_step, max_staleness)
    drive(
        world,
        choose=lambda events: data.draw(st.sampled_from(events)),
        pick=lambda groups: data.draw(st.sampled_from(groups)),
        closures=closures,
    )
    assert len(world.consumed) == steps * groups_per_step
    assert not world.admission.outstanding
    assert not world.admission.can_admit()


def finish_in_reverse(world: World, commit: str) -> None:
    """Fill the line whenever possible, and let the newest unfinished group finish first, one at a time."""
    order = ["step", commit, "admit", "finish"]
    drive(world, choose=lambda events: min(events, key=(order + events).index), pick=max, closures=0)


@pytest.mark.parametrize("commit", ["commit_next", "commit"])
@pytest.mark.parametrize("groups_per_step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("max_staleness", BOUNDS)
def test_staleness_reaches_the_bound_and_stays_there(
    max_staleness: int, groups_per_step: int, commit: str
) -> None:
    world = World(12, groups_per_step, max_staleness)
    finish_in_reverse(world, commit)
    assert max(world.staleness) == max_staleness
    assert len(world.consumed) == 12 * groups_per_step


def test_without_the_deadline_rule_the_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting alone is not enough, so the tests above really test the rule."""
    monkeypatch.setattr(
        Admission, "may_commit", lambda self, g: not self.step_ready and g not in self.committed
    )
    monkeypatch.setattr(
        Admission, "next_commit", lambda self, ready: max(set(ready) - set(self.committed), default=None)
    )
    monkeypatch.setattr(World, "check", lambda self: None)
    world = World(12, 1, 2)
    finish_in_reverse(world, "commit_next")
    assert max(world.staleness) > 2


def test_two_groups_are_never_due_for_one_place() -> None:
    """B = 1, η = 2: a, b, c start at version 0, step 0 takes a; step 1 must not take the newcomer d."""
    admission = Admission(steps=10, groups_per_step=1, max_staleness=2)
    a, b, c, d = range(4)
    for group_id in (a, b, c):
        assert admission.admit(group_id) == 2
    assert not admission.can_admit()
    admission.commit(a)
    assert admission.complete_step() == [a]
    assert admission.admit(d) == 3
    assert not admission.may_commit(d)
    assert admission.next_commit([d]) is None
    assert admission.waited_for() == [b, c]
    with pytest.raises(RuntimeError, match=r"groups \[1, 2\] are due first"):
        admission.commit(d)
    assert admission.next_commit([d, c]) == c
    admission.commit(c)
    admission.complete_step()
    assert admission.overdue(b)
    assert not admission.overdue(d)
    assert admission.slack(d) == 1
    assert admission.next_commit([d]) is None
    admission.commit(b)
    admission.complete_step()
    assert admission.next_commit([d]) == d


def test_a_closed_group_makes_room_for_a_newcomer() -> None:
    admission = Admission(steps=10, groups_per_step=1, max_staleness=2)
    for group_id in range(3):
        admission.admit(group_id)
    admission.commit(0)
    admission.complete_step()
    admission.admit(3)
    assert not admission.may_commit(3)
    admission.close(1)
    assert admission.may_commit(3)
    assert admission.can_admit()


def test_strictly_on_policy_admits_one_step_at_a_time() -> None:
    admission = Admission(steps=2, groups_per_step=2, max_staleness=0)
    assert [admission.admit(g) for g in (0, 1)] == [0, 0]
    assert not admission.can_admit()
    admission.commit(1)
    admission.commit(0)
    assert not admission.can_admit(), "a committed group occupies its place until the step completes"
    assert admission.step_ready
    assert admission.complete_step() == [1, 0]
    assert (admission.version, admission.consumed) == (1, 2)
    assert admission.admit(2) == 1


def test_the_end_of_the_run_admits_no_group_in_vain() -> None:
    admission = Admission(steps=1, groups_per_step=2, max_staleness=4)
    admission.admit(0)
    admission.admit(1)
    assert not admission.can_admit()
    admission.close(1)
    assert admission.can_admit(), "a closed group is replaced"
    admission.admit(2)
    admission.commit(0)
    admission.commit(2)
    admission.complete_step()
    assert admission.finished
    assert not admission.can_admit()
    assert admission.waited_for() == []


def test_ties_go_to_the_lowest_id() -> None:
    admission = Admission(steps=5, groups_per_step=3, max_staleness=1)
    for group_id in (9, 4, 7):
        admission.admit(group_id)
    assert admission.next_commit([9, 7, 4]) == 4
    admission.commit(4)
    assert admission.next_commit([9, 7, 4]) == 7
    assert admission.next_commit([]) is None


def test_misuse_raises() -> None:
    admission = Admission(steps=1, groups_per_step=1, max_staleness=0)
    admission.admit(0)
    with pytest.raises(RuntimeError, match="outstanding already"):
        admission.admit(0)
    with pytest.raises(RuntimeError, match="may not start"):
        admission.admit(1)
    for call in (admission.may_commit, admission.commit, admission.close, admission.slack):
        with pytest.raises(RuntimeError, match="group 5 is not outstanding"):
            call(5)
    with pytest.raises(RuntimeError, match="0 of its 1"):
        admission.complete_step()
    admission.commit(0)
    assert not admission.may_commit(0)
    with pytest.raises(RuntimeError, match="may not be committed"):
        admission.commit(0)
    with pytest.raises(RuntimeError, match="may not be closed"):
        admission.close(0)
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="at least"):
            Admission(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": None}, "integer"),
        ({"outstanding": [[0]]}, "malformed"),
        ({"outstanding": [[0, "2"]]}, "integer"),
        ({"version": 6, "consumed": 12}, r"version lies in 0\.\.steps"),
        ({"consumed": 1}, "every step consumed its groups"),
        ({"outstanding": [[7, 0]], "committed": []}, "deadlines lie in"),
        ({"outstanding": [[7, 4]], "committed": []}, "deadlines lie in"),
        ({"outstanding": [[7, 3], [7, 3]]}, "outstanding twice"),
        ({"committed": [3]}, "committed groups are outstanding"),
        ({"committed": [7, 7]}, "committed groups are outstanding"),
        ({"outstanding": [[g, 3] for g in range(7)], "committed": []}, "no more groups are outstanding"),
        ({"outstanding": [[g, 1] for g in range(3)], "committed": []}, "every deadline can still be met"),
        ({"outstanding": [[g, 2] for g in range(3)], "committed": [0, 1, 2]}, "no more than its places"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_a_state_that_could_break_the_bound_is_refused(changes: dict[str, object], message: str) -> None:
    state = {
        "steps": 5, "groups_per_step": 2, "max_staleness": 2, "version": 1, "consumed": 2,
        "outstanding": [[7, 2], [8, 3]], "committed": [7],
    }  # fmt: skip
    assert Admission.from_state(state).state_dict() == state
    with pytest.raises(ValueError, match=message):
        Admission.from_state(state | changes)
    with pytest.raises(ValueError, match="malformed"):
        Admission.from_state({k: v for k, v in state.items() if k != "outstanding"})
