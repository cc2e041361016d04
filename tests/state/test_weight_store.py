"""Weights in shared memory: whole versions only, pinned ones untouched, the dead hold nothing, damage is refused."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from store_cases import Child, child, fill, remove, store_name
from torch import nn

from headrace.errors import HeadraceError, LineStuckError, UserError
from headrace.state import shared_memory, weights
from headrace.state.shared_memory import SharedMemoryError, segment_path
from headrace.state.weights import PinnedWeights, WeightReader, WeightStore, remove_abandoned

READER = """
import sys
from headrace.state.weights import WeightReader
reader = WeightReader(sys.argv[1], "engine")
pinned = reader.pin()
print(pinned.version, flush=True)
sys.stdin.readline()
"""
PUBLISHER = """
import sys, time
import torch
from torch import nn
from headrace.state import weights
module = nn.Linear(300, 200)
store = weights.WeightStore(sys.argv[1], module)
for parameter in module.parameters():
    parameter.data.fill_(7.0)
store.publish(3, "w3")
store.publish(4, "w4")
def hang(memory, context=b""):
    print("copied", flush=True)
    time.sleep(60)
weights.fingerprint = hang
for parameter in module.parameters():
    parameter.data.fill_(8.0)
store.publish(5, "w5")
"""


class Tied(nn.Module):
    """Two names for one weight, several types, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.small = nn.Parameter(torch.randn(7).bfloat16())
        self.register_buffer("steps", torch.tensor(12))
        self.register_buffer("hidden", torch.zeros(9), persistent=False)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = store_name()
    yield chosen
    remove(chosen)


def test_a_reader_sees_what_was_published_and_tied_weights_stand_once(name: str) -> None:
    module = Tied()
    with WeightStore(name, module) as store, WeightReader(name, "engine") as reader:
        assert reader.newest() is None
        store.publish(3, "w3")
        reader.check(module)
        pinned = reader.pin()
        assert (pinned.version, pinned.weights_id) == (3, "w3")
        assert set(pinned.tensors) == set(module.state_dict())
        for key, value in module.state_dict().items():
            assert pinned.tensors[key].dtype == value.dtype
            assert torch.equal(pinned.tensors[key], value)
        assert pinned.tensors["head.weight"] is pinned.tensors["embedding.weight"]
        assert len(reader.segment.layout) == 3
        assert store.readers == [f"process {os.getpid()} engine"]
    assert not segment_path(name).exists()


def test_what_a_reader_writes_by_mistake_reaches_nobody(name: str) -> None:
    with (
        WeightStore(name, nn.Linear(4, 4)) as store,
        WeightReader(name) as ours,
        WeightReader(name) as theirs,
    ):
        store.publish(0, "w0")
        ours.pin().tensors["weight"].fill_(5.0)
        assert torch.equal(theirs.pin().tensors["weight"], store.module.weight)


def values(pinned: PinnedWeights) -> list[float]:
    return pinned.tensors["weight"].unique().tolist()


def publish(store: WeightStore, version: int) -> None:
    fill(store.module, version)
    store.publish(version, f"w{version}")


def test_a_pinned_version_is_never_overwritten_and_the_error_names_the_reader(name: str) -> None:
    with (
        WeightStore(name, nn.Linear(64, 64), timeout_s=0.05) as store,
        WeightReader(name, "slow") as slow,
        WeightReader(name, "fast") as fast,
    ):
        publish(store, 1)
        first = slow.pin()
        publish(store, 2)
        second = fast.pin()
        fill(store.module, 3)
        with pytest.raises(LineStuckError, match=r"version 3 waited 0.05 s for reader '.*slow'.*version 1"):
            store.publish(3, "w3")
        assert (values(first), values(second)) == ([1], [2])
        assert fast.newest() == second.published
        first.release()
        publish(store, 3)
        third = slow.pin()
        assert (values(second), values(third)) == ([2], [3])
        with pytest.raises(LineStuckError, match=r"version 4 waited .* '.*fast'.*version 2"):
            store.publish(4, "w4")
        second.release()
        publish(store, 4)
        assert values(fast.pin()) == [4]


def test_a_version_that_nobody_uses_gives_way_to_a_newer_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that stays with an old version, or refuses the new one, must not stop the publisher."""
    with WeightStore(name, nn.Linear(64, 64), timeout_s=0.05) as store, WeightReader(name) as reader:
        publish(store, 1)
        pinned = reader.pin()
        for version in range(2, 6):
            publish(store, version)
            assert reader.newest() == store.published
            assert values(pinned) == [1]
        with monkeypatch.context() as patch:
            patch.setattr("headrace.state.weights.fingerprint", lambda memory: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                publish(store, 6)
        assert reader.newest() == pinned.published == store.published
        publish(store, 7)
        assert values(reader.pin()) == [7]


def test_two_pins_of_one_version_are_two(name: str) -> None:
    with WeightStore(name, nn.Linear(4, 4), timeout_s=0.02) as store, WeightReader(name) as reader:
        publish(store, 0)
        pins = [reader.pin(), reader.pin()]
        publish(store, 1)
        pins.append(reader.pin())
        for pinned in (pins[0], pins[0], pins[2]):
            pinned.release()
        publish(store, 2)
        pins.append(reader.pin())
        assert values(pins[1]) == [0]
        with pytest.raises(LineStuckError):
            publish(store, 3)
        pins[1].release()
        publish(store, 3)


def test_a_dead_reader_holds_nothing(name: str) -> None:
    with WeightStore(name, nn.Linear(4, 4), timeout_s=0.05) as store, WeightReader(name) as other:
        publish(store, 0)
        with child(READER, name) as reader:
            assert reader.line() == "0"
            publish(store, 1)
            other.pin()
            with pytest.raises(LineStuckError, match=f"process {reader.process.pid} engine"):
                publish(store, 2)
            reader.kill()
            publish(store, 2)
            assert len(store.readers) == 1


def test_a_publisher_killed_in_the_middle_leaves_the_version_before_and_can_be_replaced(name: str) -> None:
    publisher = Child(PUBLISHER, name)
    try:
        assert publisher.line() == "copied"
        with WeightReader(name) as reader:
            assert reader.publisher_alive
            with pytest.raises(UserError, match="another process publishes weights"):
                WeightStore(name, nn.Linear(300, 200))
            assert reader.newest().version == 4  # type: ignore[union-attr]
            publisher.kill()
            assert not reader.publisher_alive
            pinned = reader.pin()
            assert (pinned.version, pinned.weights_id) == (4, "w4")
            assert pinned.tensors["weight"].unique().tolist() == [7.0]
            pinned.release()
            with WeightStore(name, nn.Linear(300, 200)) as store:  # readers stay
                assert store.published == pinned.published
                fill(store.module, 9.0)
                store.publish(5, "again")
                assert reader.pin().tensors["bias"].unique().tolist() == [9.0]
    finally:
        publisher.kill()


def test_readers_never_see_halves_while_versions_fly_by(name: str) -> None:
    module = nn.Linear(200, 150)
    fill(module, 0.0)
    with WeightStore(name, module) as store:
        store.publish(0, "w0")
        done = threading.Event()
        failures: list[str] = []
        seen: list[set[int]] = [set(), set()]

        def read(number: int) -> None:
            with WeightReader(name) as reader:
                while not done.is_set():
                    pinned = reader.pin()
                    found = torch.cat([t.flatten() for t in pinned.tensors.values()]).unique().tolist()
                    if found != [float(pinned.version)]:
                        failures.append(f"version {pinned.version} holds {found}")
                    seen[number].add(pinned.version)
                    pinned.release()

        threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, 300):
            fill(module, version)
            store.publish(version, f"w{version}")
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert all(len(versions) > 3 for versions in seen)


def test_a_buffer_that_was_written_again_before_it_was_pinned_is_not_taken_for_what_it_was(name: str) -> None:
    with WeightStore(name, nn.Linear(4, 4)) as store, WeightReader(name) as reader:
        publish(store, 0)
        found = reader.segment.newest()
        assert found is not None
        publish(store, 1)
        publish(store, 2)
        assert reader._try_pin(*found) is None
        publish(store, 3)
        assert values(reader.pin()) == [3]


def test_a_failing_publish_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightStore(name, nn.Linear(4, 4)) as store, WeightReader(name) as reader:
        store.publish(0, "w0")
        with monkeypatch.context() as patch:
            patch.setattr("headrace.state.weights.fingerprint", lambda memory: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.publish(1, "w1")
        assert reader.pin().version == 0
        assert store.publish(1, "w1").sequence == 2


def use(name: str) -> dict[str, torch.Tensor] | None:
    """What a new reader gets, as copies; None if it is refused in one line."""
    try:
        with WeightReader(name) as reader:
            reader.check(nn.Linear(30, 20))
            return {key: tensor.clone() for key, tensor in reader.pin(timeout_s=0).tensors.items()}
    except HeadraceError:
        return None


def test_flipped_bits_are_refused_or_harmless(name: str) -> None:
    module = nn.Linear(30, 20)
    with WeightStore(name, module) as store:
        store.publish(0, "w0")
        store.publish(1, "w1")
        segment = store._segment
        layout_end = 8192 + 400
        regions = [(0, 64, 64 * 8), (64, 80, 128), (128, 2176, 120), (8192, layout_end, 100)]
        regions += [
            (segment.start + i * segment.size, segment.start + i * segment.size + 2560, 60) for i in (0, 1)
        ]
        generator = random.Random(0)
        refused = 0
        with segment_path(name).open("r+b", buffering=0) as file:
            for start, stop, count in regions:
                bits = range(start * 8, stop * 8)
                for bit in generator.sample(bits, min(count, len(bits))):
                    byte = os.pread(file.fileno(), 1, bit // 8)
                    os.pwrite(file.fileno(), bytes([byte[0] ^ (1 << bit % 8)]), bit // 8)
                    found = use(name)
                    refused += found is None
                    if found is not None:
                        assert all(torch.equal(found[k], v) for k, v in module.state_dict().items())
                    os.pwrite(file.fileno(), byte, bit // 8)
        assert refused > 500
        assert use(name) is not None


def test_a_segment_that_was_cut_short_is_refused(name: str) -> None:
    with WeightStore(name, nn.Linear(30, 20)) as store, WeightReader(name) as attached:
        store.publish(0, "w0")
        for size in (196_607, 70_000, 9_000, 100, 10, 0):
            os.truncate(segment_path(name), size)
            assert use(name) is None
            with pytest.raises(SharedMemoryError, match="damaged"):
                attached.pin(timeout_s=0)


def test_missing_foreign_replaced_and_wrong_ones_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="nobody publishes weights"):
        WeightReader(name)
    segment_path(name).write_bytes(bytes(100_000))
    with pytest.raises(SharedMemoryError, match="does not hold weights"):
        WeightReader(name)
    with WeightStore(name, nn.Linear(30, 20)) as store:  # what stood there is replaced
        store.publish(0, "w0")
        with WeightReader(name) as reader:
            with pytest.raises(
                UserError, match=r"weight is float32 \[21, 30\] here and float32 \[20, 30\] there"
            ):
                reader.check(nn.Linear(30, 21))
            with pytest.raises(UserError, match="bias is none here"):
                reader.check(nn.Linear(30, 20, bias=False))
            store.close()
            with pytest.raises(SharedMemoryError, match="removed or replaced"):
                reader.newest()


@pytest.mark.parametrize("bad", ["", "../x", "a/b", "x" * 101])
def test_impossible_names(bad: str) -> None:
    with pytest.raises(UserError, match="cannot name shared weights"):
        WeightStore(bad, nn.Linear(2, 2))


def test_too_little_shared_memory_is_said_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(UserError, match="too little shared memory for weights"):
        WeightStore(name, nn.Linear(2, 2))
    assert not segment_path(name).exists()


def test_a_model_that_changed_its_shape_is_not_published(name: str) -> None:
    module = nn.Linear(4, 4)
    with WeightStore(name, module) as store:
        module.weight = nn.Parameter(torch.zeros(5, 4))
        with pytest.raises(UserError, match="the model has changed"):
            store.publish(0, "w0")


def test_abandoned_stores_can_be_removed_and_others_stay(name: str) -> None:
    store = WeightStore(name, nn.Linear(4, 4))
    store.publish(0, "w0")
    assert name not in remove_abandoned()
    reader = WeightReader(name)
    store._segment.close()  # as if it were killed
    assert name not in remove_abandoned()
    reader.close()
    assert name in remove_abandoned()
    assert not segment_path(name).exists()


def test_of_many_that_start_at_once_over_a_dead_store_one_publishes(name: str) -> None:
    def publish(start: threading.Barrier, opened: list[WeightStore]) -> None:
        start.wait()
        try:
            store = WeightStore(name, nn.Linear(8, 8))
        except UserError:
            return
        opened.append(store)
        store.publish(1, "w1")

    for number in range(20):
        WeightStore(name, nn.Linear(4, 4 + number))._segment.close()  # as if it were killed
        opened: list[WeightStore] = []
        start = threading.Barrier(3)
        threads = [threading.Thread(target=publish, args=(start, opened)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (store,) = opened
        with WeightReader(name) as reader:
            assert reader.newest() == store.published
        store.close()


def test_a_publish_into_a_removed_segment_is_an_error(name: str) -> None:
    with WeightStore(name, nn.Linear(4, 4)) as store:
        segment_path(name).unlink()
        with pytest.raises(SharedMemoryError, match="was removed or replaced"):
            store.publish(0, "w0")


def test_a_new_store_gives_back_what_a_killed_one_left(name: str) -> None:
    WeightStore(f"{name}-killed", nn.Linear(4, 4))._segment.close()
    assert segment_path(f"{name}-killed").exists()
    with WeightStore(name, nn.Linear(4, 4)):
        assert not segment_path(f"{name}-killed").exists()


def test_a_store_that_is_removed_while_it_is_taken_over_is_made_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(4, 4)
    WeightStore(name, module)._segment.close()
    lock = weights.try_lock

    def removed_first(file: int, byte: int, *, exclusive: bool) -> bool:
        monkeypatch.setattr(weights, "try_lock", lock)
        assert remove_abandoned() == [name]
        return lock(file, byte, exclusive=exclusive)

    monkeypatch.setattr(weights, "try_lock", removed_first)
    with WeightStore(name, module) as store:
        store.publish(0, "w0")
        assert WeightReader(name).newest() == store.published
