"""An engine that follows a store: zero-copy, packed beside, switched between two steps, never damaged weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from engine_cases import (
    CONTEXT,
    Request,
    assert_clean,
    assert_consistent,
    check_request,
    random_prompt,
    run,
    set_version,
    step,
    tiny_engine,
    tiny_model,
)
from store_cases import remove, store_name

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine.follow import WeightFollower, follow
from headrace.engine.forward import LlamaForward, ModuleForward
from headrace.errors import LineStuckError, UserError
from headrace.models import LoadedModel
from headrace.state.shared_memory import segment_path
from headrace.state.weights import WeightStore
from headrace.types import Sampling

KINDS = [
    pytest.param("float32", {}, LlamaForward, marks=pytest.mark.kernels, id="kernels"),
    pytest.param(
        "float32", {"weight_format": "int8"}, LlamaForward, marks=pytest.mark.kernels, id="int8 kernels"
    ),
    pytest.param("float32", {}, ModuleForward, id="packed module"),
    pytest.param(
        "float32", {"weight_format": "int8"}, ModuleForward, marks=pytest.mark.kernels, id="int8 module"
    ),
    pytest.param("float64", {}, ModuleForward, id="float64"),
]
GREEDY = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [random_prompt(1, 12), random_prompt(2, 5)]


class Publisher:
    """tiny-random at a version, published."""

    def __init__(self, name: str, dtype: str) -> None:
        self.model, self.dtype = tiny_model(dtype), dtype
        self.store = WeightStore(name, self.model.module, timeout_s=0.05)
        self.publish(0)

    def publish(self, version: int) -> None:
        set_version(self.model.module, version, self.dtype)
        self.store.publish(version, f"w{version}")


@pytest.fixture
def name() -> Iterator[str]:
    chosen = store_name()
    yield chosen
    remove(chosen)


def following(name: str, dtype: str = "float64", **settings: object) -> WeightFollower:
    settings = {"context_length": CONTEXT, "max_sequences": 4, "prefix_cache_mb": 1} | settings
    return follow(tiny_model(dtype), name, EngineConfig(**settings), reader="test")


def switch_to(follower: WeightFollower, version: int) -> None:
    follower.wait(version, timeout_s=20)
    assert follower.engine.version == version


@pytest.mark.parametrize(("dtype", "settings", "kind"), KINDS)
def test_each_version_gives_the_bits_that_it_gives_in_one_process(
    name: str, dtype: str, settings: dict[str, object], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is ModuleForward:
        monkeypatch.setattr("headrace.engine.forward._llama_shaped", lambda module: False)
    publisher = Publisher(name, dtype)
    reference = tiny_engine(dtype, **settings)
    with publisher.store, following(name, dtype, **settings) as follower:
        engine = follower.engine
        assert isinstance(engine, Engine)
        assert type(engine.forward) is kind
        for version in range(4):
            if version:
                publisher.publish(version)
                switch_to(follower, version)
                set_version(reference.model.module, version, dtype)
                reference.update_weights(version, f"w{version}")
            assert engine.generate(PROMPTS, GREEDY) == reference.generate(PROMPTS, GREEDY)
            assert engine.weights_id == f"w{version}"
        assert (follower.switches, follower.refused) == (3, 0)


def mapped(model: LoadedModel, follower: WeightFollower) -> bool:
    """Whether every parameter lies in the pinned buffer."""
    memory = follower.reader.segment.memory(follower._pinned._buffer)
    start, stop = memory.data_ptr(), memory.data_ptr() + len(memory)
    return all(start <= p.data_ptr() < stop for p in model.module.parameters())


@pytest.mark.kernels
def test_parameters_are_views_and_two_packed_sets_take_turns(name: str) -> None:
    publisher = Publisher(name, "float32")
    with publisher.store, following(name, "float32") as follower:
        packed = set()
        for version in range(6):
            if version:
                publisher.publish(version)
                switch_to(follower, version)
            assert mapped(follower.engine.model, follower)  # type: ignore[attr-defined]
            packed.add(follower.engine.forward._kernel.head.weight.data_ptr())  # type: ignore[attr-defined]
        assert len(packed) == 2


def test_it_decodes_on_the_old_version_while_the_new_one_is_packed(name: str) -> None:
    publisher = Publisher(name, "float64")
    with publisher.store, following(name) as follower:
        engine = follower.engine
        assert isinstance(engine, Engine)
        prepare, go, begun = engine.forward.prepare, threading.Event(), threading.Event()

        def held(tensors):  # type: ignore[no-untyped-def]
            begun.set()
            assert torch.get_num_threads() == 1
            assert go.wait(20)
            return prepare(tensors)

        engine.forward.prepare = held  # type: ignore[method-assign]
        made = {i: Request(PROMPTS[i % 2], Sampling(max_tokens=30, ignore_eos=True), key=i) for i in range(6)}
        for number, request in made.items():
            request.submit(engine, number)
        publisher.publish(1)
        assert not follower.poll()
        assert begun.wait(20)
        for _ in range(6):
            assert not follower.poll()
            step(engine, made)
        assert follower.packing
        with pytest.raises(LineStuckError, match=r"reader 'process .* test', which still uses version 0"):
            publisher.publish(2)  # both buffers are in use
        go.set()
        switch_to(follower, 1)
        assert_consistent(engine)
        publisher.publish(2)  # the old one is not
        step(engine, made)
        switch_to(follower, 2)
        run(engine, made)
        assert {v for request in made.values() for v in request.versions} == {0, 1, 2}
        for request in made.values():
            check_request(request)
        assert_clean(engine)
        assert 0 < follower.last_switch_s < 0.1
        assert follower.last_pack_s > 0


def test_a_publisher_that_waits_for_a_buffer_goes_on_at_the_switch(name: str) -> None:
    publisher = Publisher(name, "float64")
    with publisher.store, following(name) as follower:
        publisher.publish(1)
        follower.poll()
        while not follower._packing.done():  # type: ignore[union-attr]
            time.sleep(0.001)
        publisher.store.timeout_s = 20
        ahead = threading.Thread(target=publisher.publish, args=(2,))
        ahead.start()
        ahead.join(0.05)
        assert ahead.is_alive()
        switch_to(follower, 1)
        ahead.join(20)
        assert not ahead.is_alive()
        switch_to(follower, 2)
        assert follower.switches == 2


def test_damaged_weights_are_refused_once_and_the_next_version_is_taken(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(name, "float64")
    with publisher.store, following(name, prefix_cache_mb=0) as follower:
        before = follower.engine.generate(PROMPTS, GREEDY)  # type: ignore[attr-defined]
        publisher.publish(1)
        segment = publisher.store._segment
        with segment_path(name).open("r+b", buffering=0) as file:
            file.seek(segment.start + publisher.store._current * segment.size + 1000)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 4]))
        with pytest.raises(LineStuckError, match="1 were refused"):
            follower.wait(1, timeout_s=0.5)
        assert [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()] == [
            record.getMessage() for record in caplog.records
        ]
        assert len(caplog.records) == 1
        assert follower.engine.generate(PROMPTS, GREEDY) == before  # type: ignore[attr-defined]
        publisher.publish(2)
        switch_to(follower, 2)
        assert follower.refused == 1


def test_a_store_that_went_away_is_said_once_and_the_engine_goes_on(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(name, "float64")
    with following(name) as follower:
        publisher.store.close()
        for _ in range(3):
            assert not follower.poll()
        assert len(caplog.records) == 1
        assert follower.refused == 1
        follower.engine.generate(PROMPTS, GREEDY)  # type: ignore[attr-defined]


def test_another_model_and_another_device_are_refused_and_leave_no_reader(name: str) -> None:
    publisher = Publisher(name, "float32")
    with publisher.store:
        with pytest.raises(UserError, match=r"belong to another model: .*float64.*here and float32.*there"):
            following(name, "float64")
        assert publisher.store.readers == []
