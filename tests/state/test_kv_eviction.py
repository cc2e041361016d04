"""Eviction policies: formulas, what is learned, and traces on which the cost-aware one must beat the baseline."""

from collections.abc import Callable

import numpy as np
import pytest
from kv_cases import BLOCK, Clock, insert, make_directory, make_host, restored

from headrace.state.directory import Directory
from headrace.state.eviction import (
    BlockFacts,
    CostAware,
    EvictionPolicy,
    Kind,
    LeastRecentlyUsed,
    PrefillCost,
    finite,
    make_policy,
)

SECONDS_PER_TOKEN, SECONDS_PER_DEPTH = 1e-3, 1e-5


def facts(
    kinds: list[Kind], used: list[float], reach: object = 100, depth: object = 0, expected: object = 0.0
) -> BlockFacts:
    count = len(kinds)
    return BlockFacts(
        np.array(kinds),
        np.array(used, dtype=np.float64),
        np.broadcast_to(np.array(reach), count),
        np.broadcast_to(np.array(depth), count),
        np.broadcast_to(np.array(expected, dtype=np.float64), count),
    )


@pytest.mark.parametrize("name", ["lru", "cost"])
def test_more_recent_is_worth_more_and_a_chain_goes_from_its_end(name: str) -> None:
    policy = make_policy(name)
    for kind in Kind:
        values = policy.values(1000.0, facts([kind] * 4, [10.0, 900.0, 990.0, 1000.0]))
        assert list(np.argsort(values)) == [0, 1, 2, 3]
        values = policy.values(1000.0, facts([kind] * 3, [990.0] * 3, depth=[0, 16, 32]))
        assert list(np.argsort(values)) == [2, 1, 0]


def test_what_is_worth_a_byte() -> None:
    policy = CostAware()
    for start in (0, 500, 2000):
        policy.prefilled(start, 100, 100 * (1e-3 + 1e-6 * (start + 50)))
    now = 1000.0
    kinds = [Kind.FINISHED, Kind.SHARED, Kind.WAITING]
    assert list(np.argsort(policy.values(now, facts(kinds, [990.0] * 3)))) == [0, 1, 2]
    deeper = policy.values(now, facts([Kind.SHARED] * 2, [990.0] * 2, reach=[2000, 100]))
    assert deeper[0] / deeper[1] == pytest.approx(3e-3 / 1.1e-3, rel=1e-3)
    sooner = policy.values(now, facts([Kind.WAITING] * 2, [900.0] * 2, expected=[1020.0, 1200.0]))
    assert sooner[0] / sooner[1] == pytest.approx(10)
    overdue = policy.values(now, facts([Kind.WAITING] * 2, [0.0] * 2, expected=[1001.0, 10.0]))
    assert overdue[0] > overdue[1]
    keep = policy.worth_keeping(now, facts(kinds, [999.0, 999.0, 999.0]))
    assert list(keep) == [False, True, True] or list(keep) == [True, True, True]
    assert not policy.worth_keeping(now, facts([Kind.SHARED], [0.0]))[0]
    assert LeastRecentlyUsed().worth_keeping(now, facts(kinds, [0.0] * 3)).all()


def test_chances_are_measured() -> None:
    policy = CostAware()
    for _ in range(100):
        policy.stored(Kind.SHARED, 10)
        policy.stored(Kind.FINISHED, 10)
        policy.reused(Kind.FINISHED, 9, 5.0)
    values = policy.values(100.0, facts([Kind.SHARED, Kind.FINISHED], [99.0, 99.0]))
    assert values[1] > 5 * values[0]
    assert policy.reuse[Kind.FINISHED].interval_s == pytest.approx(5.0, rel=0.2)


def test_prefill_cost_is_fitted_and_never_negative() -> None:
    cost = PrefillCost()
    assert cost.per_token(np.array([5.0]))[0] == 1e-3
    rng = np.random.default_rng(0)
    for _ in range(300):
        start, tokens = int(rng.integers(4000)), int(rng.integers(1, 500))
        seconds = tokens * 5e-4 + tokens * (start + tokens / 2) * 2e-7
        cost.observe(start, tokens, seconds * float(rng.lognormal(0, 0.1)))
    assert cost.per_token(np.array([0.0, 4000.0])) == pytest.approx([5e-4, 1.3e-3], rel=0.15)
    for start, seconds in ((0, 9.0), (1000, 0.1), (3000, 0.0)):
        cost.observe(start, 10, seconds)
    assert (cost.per_token(np.array([0.0, 1e6])) > 0).all()


def test_times_from_damaged_memory_are_numbers() -> None:
    damaged = np.array([np.nan, np.inf, -np.inf, 1e300, 5.0])
    assert list(finite(damaged, 10.0)) == [0.0, 0.0, 0.0, 10.0, 5.0]


Trace = list[tuple[float, list[int], Kind, float | None, bool]]
"""When, which tokens, their kind, in how many seconds the session is expected back, and whether it has ended."""


def sessions_and_floods(seed: int, floods: float = 1.0) -> Trace:
    """Sessions of several growing turns, and between them prompts that nobody uses twice."""
    rng = np.random.default_rng(seed)
    events: Trace = []
    for session in range(14):
        now = float(rng.uniform(0, 60))
        length = 0
        turns = int(rng.integers(3, 7))
        for turn in range(turns):
            length += int(rng.integers(1, 4)) * BLOCK
            wait = float(rng.uniform(8, 14))
            tokens = [1000 + session * 50 + i for i in range(length)]
            last = turn == turns - 1
            events.append((now, tokens, Kind.WAITING, None if last else wait, last))
            now += wait
    for _ in range(int(160 * floods)):
        first = int(rng.integers(10_000, 1_000_000))
        events.append(
            (float(rng.uniform(0, 130)), list(range(first, first + 3 * BLOCK)), Kind.SHARED, None, False)
        )
    return sorted(events, key=lambda event: event[0])


def shared_prompts(seed: int) -> Trace:
    """Prompts drawn by popularity, all of one kind: nothing to know but what was used when."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, 200, 600))
    which = rng.zipf(1.3, 600) % 60
    return [
        (float(t), [int(w) * 20 + i for i in range(12)], Kind.SHARED, None, False)
        for t, w in zip(times, which, strict=True)
    ]


def one_scan(seed: int) -> Trace:
    """Round and round through more than fits: the worst case of recency, for both."""
    return [(float(i), [(i % 25) * 20 + j for j in range(12)], Kind.SHARED, None, False) for i in range(200)]


def seconds_of_prefill(directory: Directory, clock: Clock, trace: Trace) -> float:
    """What the requests of a trace had to compute that could be saved, in seconds of the model's cost."""
    spent = 0.0
    for when, tokens, kind, back, ended in trace:
        clock.now = 1_000_000.0 + when
        start = restored(directory, tokens)
        count = len(tokens) - start
        seconds = count * (SECONDS_PER_TOKEN + SECONDS_PER_DEPTH * (start + count / 2))
        if count:
            directory.policy.prefilled(start, count, seconds)
        # What a flood's prompts take nobody can save.
        spent += seconds if start or kind != Kind.SHARED or tokens[0] < 10_000 else 0.0
        insert(directory, tokens, kind=kind)
        if back is not None:
            directory.expect(tokens, back)
        if ended:
            directory.finish(tokens)
    return spent


def run(trace: Trace, policy: EvictionPolicy, tmp_path, *, host: bool) -> float:  # type: ignore[no-untyped-def]
    clock = Clock()
    directory = make_directory(
        device_blocks=20 if not host else 8,
        host=make_host(tmp_path, 24, policy=policy, clock=clock) if host else None,
        clock=clock,
        policy=policy,
    )
    spent = seconds_of_prefill(directory, clock, trace)
    directory.close()
    return spent


@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_cost_aware_beats_lru_on_returning_sessions_between_floods(tmp_path, host: bool) -> None:  # type: ignore[no-untyped-def]
    ratios = []
    for seed in range(5):
        trace = sessions_and_floods(seed)
        baseline = run(trace, LeastRecentlyUsed(), tmp_path, host=host)
        ratios.append(run(trace, CostAware(), tmp_path, host=host) / baseline)
    print(ratios)
    assert max(ratios) < 1.0
    assert np.mean(ratios) < 0.93


@pytest.mark.parametrize(
    "make", [shared_prompts, one_scan, lambda seed: sessions_and_floods(seed, floods=0.1)]
)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_cost_aware_never_loses_badly(tmp_path, host: bool, make: Callable[[int], Trace]) -> None:  # type: ignore[no-untyped-def]
    for seed in range(2):
        baseline = run(make(seed), LeastRecentlyUsed(), tmp_path, host=host)
        ratio = run(make(seed), CostAware(), tmp_path, host=host) / baseline
        print(ratio)
        assert ratio < 1.1
