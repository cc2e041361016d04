"""The order of tasks is a function of (environment, split, seed), whatever is asked for when."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.task_stream import READ_AHEAD, TaskStream
from headrace.errors import EnvironmentSetupError


class Source:
    """An environment whose tasks come from a function of the split."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self.make = make
        self.calls = 0

    def tasks(self, split: str) -> Any:
        self.calls += 1
        return self.make(split)

    def reward(self, task: dict[str, Any], completion: str) -> float:
        return 0.0


def numbered(numbers: Iterable[int]) -> Iterable[dict[str, Any]]:
    return ({"prompt": str(n), "n": n} for n in numbers)


class AsyncSource:
    def __init__(self, count: int) -> None:
        self.count = count

    async def tasks(self, split: str) -> Any:
        for task in numbered(range(self.count)):
            yield task

    async def reward(self, task: dict[str, Any], completion: str) -> float:
        return 0.0


class AwaitedSource(AsyncSource):
    async def tasks(self, split: str) -> Any:
        return list(numbered(range(self.count)))


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: Source(lambda split: list(numbered(range(7)))),
    "generator": lambda: Source(lambda split: numbered(range(7))),
    "set-like": lambda: Source(lambda split: {i: task for i, task in enumerate(numbered(range(7)))}.values()),
    "async generator": lambda: AsyncSource(7),
    "async list": lambda: AwaitedSource(7),
}


def order(stream: TaskStream, places: Iterable[int]) -> list[int]:
    return [stream.get(place)["n"] for place in places]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_finite_source_is_reshuffled_each_epoch(kind: str) -> None:
    epochs = [order(TaskStream(SOURCES[kind](), "train", 0), range(7 * e, 7 * e + 7)) for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order(TaskStream(SOURCES["list"](), "train", 0), range(28)) == list(itertools.chain(*epochs))
    assert order(TaskStream(SOURCES[kind](), "train", 1), range(7)) != epochs[0]


@pytest.mark.parametrize("kind", SOURCES)
def test_the_test_split_keeps_its_order_and_take_stops_at_its_end(kind: str) -> None:
    for seed in (0, 1):
        stream = TaskStream(SOURCES[kind](), "test", seed)
        assert [task["n"] for task in stream.first(3)] == [0, 1, 2]
        assert [task["n"] for task in stream.first(7)] == list(range(7))
        assert [task["n"] for task in stream.first(100)] == list(range(7))
        assert stream.first(0) == []
        assert order(stream, range(9)) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 25_000), min_size=1, max_size=6))
def test_an_endless_source_is_served_in_its_own_order_from_any_place(places: list[int]) -> None:
    stream = TaskStream(Source(lambda split: numbered(itertools.count())), "train", 0)
    assert order(stream, places) == places
    assert stream.length is None


def test_going_back_a_little_does_not_start_an_endless_source_again() -> None:
    source = Source(lambda split: numbered(itertools.count()))
    stream = TaskStream(source, "train", 0)
    assert order(stream, [20_000, 12_000, 20_001]) == [20_000, 12_000, 20_001]
    assert source.calls == 1
    assert order(stream, [3]) == [3]
    assert source.calls == 2


@pytest.mark.parametrize("count", [READ_AHEAD, READ_AHEAD + 1, READ_AHEAD + 7])
def test_a_long_generator_is_shuffled_once_its_length_is_known(count: int) -> None:
    def stream() -> TaskStream:
        return TaskStream(Source(lambda split: numbered(range(count))), "train", 0)

    first = order(in_order := stream(), range(count))
    second = order(in_order, range(count, 2 * count))
    assert (first == list(range(count))) == (count > READ_AHEAD)
    assert sorted(first) == sorted(second) == list(range(count))
    assert second != first
    assert second != list(range(count))
    resumed = stream()
    assert order(resumed, [count + 5, 5, count - 1]) == [second[5], first[5], first[-1]]


def test_the_test_split_is_not_read_ahead() -> None:
    read = []
    source = Source(lambda split: (read.append(i) or {"prompt": str(i)} for i in itertools.count()))
    assert len(TaskStream(source, "test", 0).first(5)) == 5
    assert read == [0, 1, 2, 3, 4]


def test_what_is_read_is_reported() -> None:
    counts: list[int] = []
    TaskStream(SOURCES["generator"](), "train", 0, on_read=counts.append).get(0)
    assert counts == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "is empty"),
        (numbered([]), "is empty"),
        (None, "returned NoneType; yield the tasks"),
        ({"prompt": "?"}, "returned dict; yield the tasks"),
        ("text", "returned str; yield the tasks"),
        ([{"question": "?"}], "without 'prompt'"),
        (["?"], "yielded '?' (str)"),
    ],
)
def test_what_is_no_source_of_tasks(split: str, source: object, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        TaskStream(Source(lambda _: source), split, 0).get(0)
    assert str(error.value).startswith(f"tasks({split!r}) ")
    assert message in str(error.value)


def test_a_generator_that_raised_is_started_anew() -> None:
    failures = iter([True, False])

    def tasks(split: str) -> Iterable[dict[str, Any]]:
        yield {"prompt": "0", "n": 0}
        if next(failures):
            raise OSError("flaky")
        yield {"prompt": "1", "n": 1}

    stream = TaskStream(Source(tasks), "test", 0)
    assert order(stream, [0]) == [0]
    with pytest.raises(OSError, match="flaky"):
        stream.get(1)
    assert order(stream, [1, 0]) == [1, 0]


def test_a_source_that_differs_when_read_again_is_an_error() -> None:
    lengths = iter([READ_AHEAD + 5, READ_AHEAD + 4])
    stream = TaskStream(Source(lambda split: numbered(range(next(lengths)))), "train", 0)
    with pytest.raises(EnvironmentSetupError, match="gave 10005 tasks and, called again, 10004"):
        stream.get(READ_AHEAD + 6)
