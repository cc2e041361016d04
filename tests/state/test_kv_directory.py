"""The directory over tiers, against what was inserted: every hit is true, blocks move between tiers, nothing raises."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from kv_cases import (
    BLOCK,
    BLOCK_BYTES,
    A,
    B,
    Clock,
    insert,
    make_directory,
    make_disk,
    make_host,
    restored,
)

from headrace.state.directory import BRING_BACK_BLOCKS, Directory
from headrace.state.eviction import CostAware, Kind, LeastRecentlyUsed
from headrace.state.report import kv_report
from headrace.state.tiers import disk as disk_module
from headrace.state.tiers.base import DEVICE, DISK, HOST

CHAIN = list(range(100, 120))  # five blocks
OTHER = list(range(200, 220))


def places(directory: Directory, tokens: list[int] = CHAIN) -> dict[str, int]:
    return {place.tier: place.matched_length for place in directory.locate(tokens)}


@pytest.fixture
def whole(tmp_path: Path) -> Directory:
    """Eight blocks on the device, eight in host memory, a thousand on disk."""
    clock = Clock()
    directory = make_directory(
        device_blocks=8,
        host=make_host(tmp_path, clock=clock),
        disk=make_disk(tmp_path / "kv", clock=clock),
        clock=clock,
    )
    yield directory
    directory.close()
    assert not list(tmp_path.glob("*headrace-kv*"))


def test_what_leaves_the_device_is_found_in_host_memory_and_then_on_disk(whole: Directory) -> None:
    chains = [list(range(base, base + 20)) for base in range(0, 1000, 100)]
    for chain in chains:
        insert(whole, chain)
        whole.cache.check_integrity()
    assert whole.disk is not None
    assert whole.disk.flush()
    stats = {stats.name: stats for stats in whole.stats()}
    assert stats[DEVICE].blocks == 8
    assert stats[HOST].blocks + stats[DISK].blocks >= 42
    assert stats[HOST].blocks <= 8 < stats[DISK].blocks
    for chain in chains:
        assert restored(whole, chain) == 20
        assert restored(whole, [*chain[:11], 7, 7, 7, 7]) >= 8
    assert stats[HOST].counters.corrupt == stats[DISK].counters.corrupt == 0
    assert {tier.counters.hits > 0 for tier in whole.tiers} == {True}


def test_one_prefix_over_three_tiers(whole: Directory) -> None:
    insert(whole, CHAIN)
    assert whole.migrate(CHAIN[:16], DEVICE, HOST) == 16
    assert whole.migrate(CHAIN[:8], HOST, DISK) == 8
    whole.host._drop(torch.arange(2).numpy())
    assert places(whole) == {DISK: 8}
    assert whole.matched_length(CHAIN) == 20
    assert restored(whole, CHAIN) == 20
    assert restored(whole, CHAIN, limit=19) == 19
    assert restored(whole, CHAIN, limit=6) == 6
    assert [tier.counters.hits for tier in whole.tiers] == [2 + 2 + 2, 2 + 2 + 2]


def test_a_block_in_host_memory_takes_no_place_on_the_device(whole: Directory) -> None:
    insert(whole, CHAIN)
    whole.migrate(CHAIN, DEVICE, HOST)
    assert whole.cache.used_bytes == 0
    longer = [*CHAIN[:16], 7, 7, 7, 7, 8, 8, 8, 8]
    insert(whole, longer)
    assert whole.migrate(longer, DEVICE, HOST) == 24
    insert(whole, [*CHAIN, 1, 2, 3])
    assert whole.cache.used_bytes == 3 * BLOCK_BYTES // BLOCK
    whole.cache.check_integrity()
    assert restored(whole, [*CHAIN, 1, 2, 3]) == 23
    whole.host.demote = None
    whole.host.evict(1 << 30)
    assert restored(whole, [*CHAIN, 1, 2, 3]) == 0  # its end hangs in the air
    insert(whole, [*CHAIN, 1, 2, 3])
    whole.cache.check_integrity()
    assert restored(whole, [*CHAIN, 1, 2, 3]) == 23


def test_a_full_block_replaces_the_part_of_it(whole: Directory) -> None:
    insert(whole, CHAIN[:18])
    insert(whole, CHAIN)
    assert whole.cache.used_bytes == 5 * BLOCK_BYTES
    whole.cache.check_integrity()


def test_other_weights_find_nothing_and_old_ones_go_first(whole: Directory) -> None:
    insert(whole, CHAIN)
    whole.migrate(CHAIN, DEVICE, HOST, keep=True)
    whole.identity = B
    assert whole.locate(CHAIN) == []
    assert restored(whole, CHAIN) == 0
    assert [place.tier for place in whole.locate(CHAIN, "weights-a")] == [DEVICE, HOST]
    insert(whole, CHAIN)
    assert restored(whole, CHAIN) == 20
    whole.retire(A)
    assert [place.tier for place in whole.locate(CHAIN, "weights-a")] == [HOST]
    whole.migrate(CHAIN, DEVICE, HOST, keep=True)  # ten in eight places: those of A give way
    assert restored(whole, CHAIN) == 20
    assert whole.host.stats().blocks <= 8
    whole.disk.flush()
    assert whole.disk.stats().blocks == 0


def test_leases_hold_until_their_deadline(whole: Directory) -> None:
    clock = whole.clock
    insert(whole, CHAIN)
    whole.migrate(CHAIN, DEVICE, HOST, keep=True)
    device, host = whole.pin(CHAIN, DEVICE, 10.0), whole.pin([*CHAIN[:9], 0, 0, 0], HOST, 10.0)
    second = whole.pin(CHAIN[:4], HOST, 5.0)
    assert (device.length, host.length, second.length) == (20, 8, 4)
    for base in range(0, 500, 100):
        insert(whole, list(range(base, base + 12)))
    assert places(whole) == {DEVICE: 20, HOST: 8}
    whole.unpin(host)
    whole.evict(HOST, 1 << 30)
    assert places(whole)[HOST] == 4  # the second lease
    clock.now += 11
    whole.evict(HOST, 1 << 30)
    whole.evict(DEVICE, 1 << 30)
    whole.disk.flush()
    assert DEVICE not in places(whole)
    whole.unpin(second)
    whole.unpin(device)
    whole.unpin(device)


def test_a_file_that_is_pinned_is_read_even_when_somebody_removed_it(whole: Directory) -> None:
    insert(whole, CHAIN)
    whole.migrate(CHAIN, DEVICE, DISK, keep=True)
    lease = whole.pin(CHAIN, DISK, 10.0)
    assert lease.length == 20
    assert whole.evict(DISK, 1 << 30) == 0
    for file in whole.disk._shelf.folder.glob("*/*.kv"):
        file.unlink()
    whole.evict(DEVICE, 1 << 30)
    whole.host.evict(1 << 30)
    assert restored(whole, CHAIN) == 20
    whole.unpin(lease)


def test_a_restart_finds_what_was_flushed(tmp_path: Path) -> None:
    first = make_directory(disk=make_disk(tmp_path / "kv"))
    insert(first, CHAIN)
    insert(first, [*CHAIN[:8], 1, 2, 3, 4])
    first.close()
    (report,) = kv_report("nobody", tmp_path / "kv")
    assert (report["tier"], report["blocks"], report["kinds"]["shared"]) == (DISK, 6, 6)
    second = make_directory(disk=make_disk(tmp_path / "kv"))
    assert places(second) == {DISK: 20}
    assert restored(second, [*CHAIN[:8], 1, 2, 3, 4]) == 12
    third = make_directory(disk=make_disk(tmp_path / "kv"), identity=B)
    assert restored(third, CHAIN) == 0
    assert second.migrate(CHAIN, DISK, DEVICE) == 20
    assert places(second)[DEVICE] == 20
    second.cache.check_integrity()
    assert restored(second, CHAIN) == 20


def test_an_expected_session_comes_back_from_disk_before_its_time(whole: Directory) -> None:
    tokens = list(range(BLOCK * (BRING_BACK_BLOCKS // 4)))
    insert(whole, tokens, kind=Kind.WAITING)
    whole.expect(tokens, 60.0)
    whole.migrate(tokens, DEVICE, DISK)
    assert whole.tick() == 0  # too early
    whole.clock.now += 59.5
    assert whole.tick() == len(tokens)
    assert places(whole, tokens)[HOST] == len(tokens)
    assert whole.tick() == 0
    assert whole._expected == {}
    assert restored(whole, tokens) == len(tokens)


def test_a_finished_session_goes_before_waiting_ones(tmp_path: Path) -> None:
    clock = Clock()
    policy = CostAware()
    host = make_host(tmp_path, 10, policy=policy, clock=clock)
    directory = make_directory(device_blocks=10, host=host, policy=policy, clock=clock)
    insert(directory, CHAIN, kind=Kind.WAITING)
    clock.now += 1
    insert(directory, OTHER, kind=Kind.WAITING)
    directory.finish(OTHER)
    insert(directory, [1, 2, 3, 4])
    assert directory.cache.matched_length(A, CHAIN) == 20
    assert directory.cache.matched_length(A, OTHER) == 16
    directory.close()


def test_a_slow_disk_is_a_miss_and_is_left_alone_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    filled = make_directory(disk=make_disk(tmp_path / "kv"))
    insert(filled, CHAIN)
    filled.close()
    gate = threading.Event()
    disk = make_disk(tmp_path / "kv", deadline_s=0.02)
    directory = make_directory(disk=disk)
    look = disk._look
    monkeypatch.setattr(disk, "_look", lambda *args: (gate.wait(20.0), look(*args))[1])
    monkeypatch.setattr(disk_module, "REFRESH_S", 0.0)
    for _ in range(5):
        assert restored(directory, CHAIN) == 0
    assert "slow" in disk.stats().note
    gate.set()
    disk._paused_until = 0.0
    assert disk._reader.submit(lambda: None).wait(10.0)
    disk._seen.clear()
    assert restored(directory, CHAIN) == 20


def test_cold_data_are_read_by_the_helper_or_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.kernels.copying import Loading

    filled = make_directory(disk=make_disk(tmp_path / "kv"))
    insert(filled, CHAIN)
    filled.close()
    directory = make_directory(disk=make_disk(tmp_path / "kv"))
    load = Loading.load
    calls = []

    def cold_first(self: Loading, views: object, *, nowait: bool = False) -> object:
        status, sums = load(self, views, nowait=nowait)  # type: ignore[arg-type]
        calls.append(nowait)
        return ([Loading.COLD[0]] * len(status), sums) if len(calls) % 2 else (status, sums)

    monkeypatch.setattr(Loading, "load", cold_first)
    assert restored(directory, CHAIN) == 20
    assert calls == [True, True]
    monkeypatch.setattr(directory.disk, "ready", lambda tickets: False)
    assert restored(directory, CHAIN) == 0
    assert directory.disk.counters.corrupt == 0


def test_nothing_counts_behind_a_block_that_came_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.kernels.copying import Loading

    filled = make_directory(disk=make_disk(tmp_path / "kv"))
    insert(filled, CHAIN)
    filled.close()
    directory = make_directory(disk=make_disk(tmp_path / "kv"))
    load = Loading.load

    def second_is_cold(self: Loading, *args: object, **kwargs: object) -> object:
        status, sums = load(self, *args, **kwargs)  # type: ignore[arg-type]
        status[1] = Loading.COLD[0]
        return status, sums

    monkeypatch.setattr(Loading, "load", second_is_cold)
    monkeypatch.setattr(directory.disk, "ready", lambda tickets: False)
    assert restored(directory, CHAIN) == BLOCK
    assert directory.cache.hit_tokens == BLOCK


def test_an_unknown_tier_is_named() -> None:
    with pytest.raises(ValueError, match="there are: device"):
        make_directory().migrate(CHAIN, DEVICE, "tape")


class Tiers(RuleBasedStateMachine):
    """Any order of operations over tiers that are too small; every hit is true."""

    folder: Path
    runs = 0
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    tier = st.sampled_from([DEVICE, HOST, DISK])

    @initialize(device=st.integers(1, 6), host=st.integers(1, 6), disk=st.integers(1, 6), lru=st.booleans())
    def start(self, device: int, host: int, disk: int, lru: bool) -> None:
        Tiers.runs += 1
        self.clock = Clock()
        self.sizes, self.policy = (device, host, disk), LeastRecentlyUsed() if lru else CostAware()
        self.leases: list[object] = []
        self.begin()

    def begin(self) -> None:
        device, host, disk = self.sizes
        common = {"policy": self.policy, "clock": self.clock}
        self.directory = make_directory(
            device_blocks=device,
            host=make_host(self.folder, host, **common),
            disk=make_disk(self.folder / f"kv-{Tiers.runs}", disk, **common),
            **common,
        )

    @rule(tokens=tokens, kind=st.sampled_from(list(Kind)))
    def insert(self, tokens: list[int], kind: Kind) -> None:
        insert(self.directory, tokens, kind=kind)

    @rule(tokens=tokens)
    def restore(self, tokens: list[int]) -> None:
        self.directory.disk._seen.clear()
        found = self.directory.matched_length(tokens)
        assert restored(self.directory, tokens) <= found

    @rule(tokens=tokens, source=tier, to=tier, keep=st.booleans())
    def migrate(self, tokens: list[int], source: str, to: str, keep: bool) -> None:
        if source != to:
            self.directory.migrate(tokens, source, to, keep=keep)

    @rule(tier=tier, blocks=st.integers(1, 5))
    def evict(self, tier: str, blocks: int) -> None:
        self.directory.evict(tier, blocks * BLOCK_BYTES)

    @rule(tokens=tokens, tier=tier)
    def pin(self, tokens: list[int], tier: str) -> None:
        self.leases.append(self.directory.pin(tokens, tier, 3.0))

    @rule()
    def unpin(self) -> None:
        if self.leases:
            self.directory.unpin(self.leases.pop())  # type: ignore[arg-type]

    @rule(tokens=tokens)
    def expect(self, tokens: list[int]) -> None:
        self.directory.expect(tokens, 2.0)

    @rule(tokens=tokens)
    def finish(self, tokens: list[int]) -> None:
        self.directory.finish(tokens)

    @rule(seconds=st.sampled_from([0.1, 2.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.directory.tick()

    @rule(identity=st.sampled_from([A, B]))
    def switch(self, identity: object) -> None:
        old, self.directory.identity = self.directory.identity, identity  # type: ignore[assignment]
        if old != identity:
            self.directory.retire(old)

    @rule()
    def restart(self) -> None:
        identity = self.directory.identity
        self.directory.close()
        self.leases.clear()
        self.begin()
        self.directory.identity = identity

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cache.check_integrity()
            for stats in self.directory.stats():
                assert stats.nbytes <= stats.capacity_bytes
                counters = stats.counters
                assert (counters.corrupt, counters.errors, counters.late) == (0, 0, 0)

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.close()


def test_any_order_of_operations_over_small_tiers(tmp_path: Path) -> None:
    Tiers.folder = tmp_path
    run_state_machine_as_test(
        Tiers,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
