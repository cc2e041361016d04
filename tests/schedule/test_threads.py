"""The number of threads beside other processes, on a faked clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule import ThreadShare


class Machine:
    """A clock and a counter of the others' CPU seconds."""

    def __init__(self, cores: int, most: int) -> None:
        self.share = ThreadShare(cores, most)
        self.now = self.others = 0.0
        self.share.observe(self.now, self.others)

    def run(self, seconds: float, others: float, every: float = 0.25) -> int:
        threads = self.share.threads
        for _ in range(round(seconds / every)):
            self.now += every
            self.others += others * every
            threads = self.share.observe(self.now, self.others)
        return threads


def test_alone_it_uses_every_core() -> None:
    assert Machine(2, 2).run(10, others=0.0) == 2
    assert Machine(2, 2).run(10, others=0.3) == 2, "a reward now and then is no neighbour"


def test_a_busy_neighbour_costs_its_cores() -> None:
    machine = Machine(2, 2)
    # Two threads against one: the neighbour gets about two thirds of a core.
    assert machine.run(1.0, others=0.67) == 1
    assert machine.run(10, others=1.0) == 1
    assert Machine(8, 8).run(5, others=3.1) == 5
    assert Machine(2, 2).run(5, others=2.0) == 1


def test_it_comes_back_when_the_neighbour_is_gone() -> None:
    machine = Machine(2, 2)
    machine.run(5, others=1.0)
    assert machine.run(1.0, others=0.0) == 1, "one quiet window may be chance"
    assert machine.run(1.0, others=0.0) == 2


def test_cores_that_it_may_not_use_anyway_do_not_matter() -> None:
    assert Machine(64, 2).run(5, others=30.0) == 2


@given(
    cores=st.integers(1, 64),
    most=st.integers(1, 64),
    loads=st.lists(st.tuples(st.floats(0, 5), st.floats(-1, 100)), max_size=30),
)
def test_the_number_is_always_possible(cores: int, most: int, loads: list[tuple[float, float]]) -> None:
    share = ThreadShare(cores, most)
    now = others = 0.0
    for seconds, load in loads:
        now, others = now + seconds, others + load * seconds
        assert 1 <= share.observe(now, others) <= most
