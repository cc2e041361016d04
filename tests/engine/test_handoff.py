"""Prompts that another process prefills: the same tokens, whatever becomes of that process."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch
from engine_cases import (
    Request,
    assert_clean,
    check_request,
    random_prompt,
    run,
    set_version,
    step,
    switch,
    tiny_model,
)
from store_cases import store_name

from headrace.config import EngineConfig
from headrace.engine import Engine, TokenEvent, scheduler
from headrace.engine.follow import WeightFollower, attach
from headrace.engine.handoff import DisaggregatedEngine
from headrace.engine.prefill import Answer, Prefiller, Progress, Prompt, Ready, Refused, packed_tokens
from headrace.engine.process import PrefillProcess, _Setup, serve
from headrace.errors import UserError
from headrace.models import LoadedModel, load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.state.weights import WeightReader, WeightStore, content_digest
from headrace.types import Sampling

SETTINGS = {"context_length": 256, "max_sequences": 6, "max_batch_tokens": 48, "prefix_cache_mb": 1}
LENGTHS = [200, 5, 150, 40, 199, 10, 90]
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True, n=2)


class Pair:
    """A single engine, and its twin with a prefilling process; both have one model."""

    def __init__(
        self, process: PrefillProcess, model: LoadedModel | None = None, weights_id: str = ""
    ) -> None:
        self.process = process
        self.model = model or load_model(resolve("tiny-random"), attn_implementation=ATTENTION)
        self.weights_id = weights_id or content_digest(self.model.module)

    def engine(self, **settings: object) -> DisaggregatedEngine:
        config = EngineConfig(**(SETTINGS | settings))
        return DisaggregatedEngine(self.model, config, self.weights_id, prefill=self.process, min_prompt=32)

    def single(self, **settings: object) -> Engine:
        return Engine(self.model, EngineConfig(**(SETTINGS | settings)), self.weights_id)


@dataclass
class Started:
    """Two processes, one over the model's folder and one that follows a store, side by side: starting takes long."""

    store: WeightStore
    folder: PrefillProcess
    follower: PrefillProcess

    def publish(self, version: int) -> None:
        set_version(self.store.module, version, "float32")
        self.store.publish(version, f"w{version}")


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    name = store_name()
    config = EngineConfig(**SETTINGS)
    with (
        WeightStore(name, tiny_model("float32").module, timeout_s=20) as store,
        PrefillProcess("tiny-random", config, slots=2) as folder,
        PrefillProcess("tiny-random", config, slots=2, store=name) as follower,
    ):
        both = Started(store, folder, follower)
        both.publish(0)
        yield both


def end(engine: DisaggregatedEngine) -> None:
    assert engine._handoffs == {}
    assert engine._free_slots == 2
    assert_clean(engine)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "settings", [{}, {"prefix_cache_mb": 0}, {"max_sequences": 1}, {"max_batch_tokens": 7}]
)
def test_tokens_and_logprobs_are_the_single_engines_in_every_bit(
    started: Started, settings: dict[str, object]
) -> None:
    pair = Pair(started.folder)
    engine, single = pair.engine(**settings), pair.single(**settings)
    for sampling in (GREEDY, Sampling(temperature=0.9, max_tokens=9, n=3, seed=4)):
        assert engine.generate(PROMPTS, sampling) == single.generate(PROMPTS, sampling)
    counts = engine.handoffs
    assert counts.adopted >= 5
    assert counts.adopted_tokens >= 199 + 149 + 39 + 198 + 89
    assert (counts.refused, counts.stale, counts.lost, counts.reason) == (0, 0, 0, "")
    assert not engine.scheduler.preemptions
    end(engine)


def test_others_decode_while_a_prompt_is_prefilled(started: Started) -> None:
    engine = Pair(started.folder).engine()
    os.kill(engine.prefill.pid, signal.SIGSTOP)
    try:
        engine.submit("short", PROMPTS[1], Sampling(max_tokens=100, ignore_eos=True))
        engine.submit("long", PROMPTS[0], Sampling(max_tokens=3, ignore_eos=True))
        events = [event for _ in range(20) for event in engine.step()]
        assert [event.request_id for event in events] == ["short"] * 20
        assert engine.num_unfinished == 2
    finally:
        os.kill(engine.prefill.pid, signal.SIGCONT)
    finish(engine, events)
    assert sum(event.request_id == "long" for event in events) == 3
    assert engine.handoffs.adopted == 1
    assert engine.last_prefilled == 0
    end(engine)


def finish(engine: Engine, events: list[TokenEvent]) -> None:
    for _ in range(5000):
        if not engine.num_unfinished:
            return
        events += engine.step()
    raise AssertionError(f"{engine.num_unfinished} requests did not end")


def test_what_waits_can_be_aborted_reprioritised_and_not_submitted_twice(
    started: Started,
) -> None:
    engine = Pair(started.folder).engine()
    for i in range(4):
        engine.submit(i, PROMPTS[i % 2 * 2], Sampling(max_tokens=3, ignore_eos=True, stop=["#"]))
    with pytest.raises(UserError, match="already running"):
        engine.submit(2, PROMPTS[0], Sampling())
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.submit(9, [10_000] * 100, Sampling())
    engine.set_priority(1, (-1,))
    assert engine._waiting(1)[1].priority == (-1,)  # type: ignore[index]
    engine.step()
    assert engine.abort(0)
    assert engine.abort(2)
    assert not engine.abort(2)
    events: list[TokenEvent] = []
    finish(engine, events)
    assert {event.request_id for event in events} == {1, 3}
    assert not engine.abort(1)
    end(engine)


def copying(
    started: Started, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> tuple[DisaggregatedEngine, dict[object, Request]]:
    """An engine in which "short" decodes and two requests of one long prompt have begun to copy their KV."""
    monkeypatch.setattr(scheduler, "ARRIVING_TOKENS", 30)
    pair = Pair(started.folder)
    engine = Pair(started.folder, tiny_model("float32"), pair.weights_id).engine(**settings)
    made: dict[object, Request] = {
        "short": Request(PROMPTS[1], Sampling(max_tokens=60, ignore_eos=True), key=1),
        "long": Request(PROMPTS[0], Sampling(max_tokens=6, ignore_eos=True), key=2),
        "again": Request(PROMPTS[0], Sampling(max_tokens=6, ignore_eos=True), key=3),
    }
    made["short"].submit(engine, "short")
    step(engine, made)
    for name in ("long", "again"):
        made[name].submit(engine, name)
    while not any(handoff.copying for handoff in engine._handoffs.values()):
        engine._exchange(0.05)
    return engine, made


@pytest.mark.parametrize("cache", [0, 1])
def test_kv_is_taken_over_in_pieces_while_others_decode(
    started: Started, monkeypatch: pytest.MonkeyPatch, cache: int
) -> None:
    engine, made = copying(started, monkeypatch, prefix_cache_mb=cache)
    moved = []
    write = engine.slots.write
    monkeypatch.setattr(engine.slots, "write", lambda *a: (moved.append(a[3]), write(*a)))
    while any(handoff.copying for handoff in engine._handoffs.values()):
        moved.append(0)
        assert "short" in {event.request_id for event in step(engine, made)}
    assert moved.count(0) == -(-2 * 199 // 30)
    assert sum(moved) == 2 * 199
    run(engine, made)
    for request in made.values():
        check_request(request, "float32")
    end(engine)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_weights_that_change_while_kv_is_taken_over_mean_local_prefill(
    started: Started, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    engine, made = copying(started, monkeypatch, kv_on_update=mode)
    for _ in range(3):
        step(engine, made)
    switch(engine, 1, "float32")
    made["later"] = Request(PROMPTS[0], Sampling(max_tokens=6, ignore_eos=True), key=4)
    made["later"].submit(engine, "later")
    run(engine, made)
    for name in ("long", "again", "later"):
        check_request(made[name], "float32")
        assert made[name].versions == [1] * 6
        assert not any(made[name].mixed)
    end(engine)


def test_what_copies_can_be_aborted(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = copying(started, monkeypatch)
    step(engine, made)
    assert engine.abort("long")
    run(engine, made)
    assert made["long"].token_ids == []
    check_request(made["again"], "float32")
    end(engine)


def test_weights_that_changed_meanwhile_mean_local_prefill(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Pair(started.folder, tiny_model("float32"), Pair(started.folder).weights_id).engine()
    made = {i: Request(PROMPTS[i], Sampling(max_tokens=8, ignore_eos=True), key=i) for i in range(5)}
    for number, request in made.items():
        request.submit(engine, number)
    # Let one prompt be ready and not yet taken over, which happens when there is no room.
    waiting = engine.scheduler
    adopt, waiting.adopt = waiting.adopt, lambda *_: False  # type: ignore[method-assign]
    for _ in range(200):
        engine._exchange(0.05)
        if any(h.ready for h in engine._handoffs.values()):
            break
    waiting.adopt = adopt  # type: ignore[method-assign]
    set_version(engine.model.module, 1, "float32")
    engine.update_weights(1, "w1")
    assert engine.handoffs.stale >= 1
    events: list[TokenEvent] = []
    finish(engine, events)
    for event in events:
        made[event.request_id].record(event)  # type: ignore[index]
    for request in made.values():
        check_request(request, "float32")
        assert request.versions == [1] * 8
    assert engine.handoffs.adopted == 0
    assert engine.handoffs.refused + engine.handoffs.stale == engine.handoffs.sent == 4
    assert len(caplog.records) <= 1
    end(engine)


def test_other_settings_are_refused_before_any_work(started: Started) -> None:
    with pytest.raises(UserError, match="computes other KV than this engine"):
        Pair(started.folder).engine(prepack=False)


def test_both_sides_follow_a_store(started: Started) -> None:
    own = tiny_model("float32")
    reader = WeightReader(started.store.name, "decode")
    pinned = attach(own, reader)
    engine = Pair(started.follower, own, pinned.weights_id).engine(prefix_cache_mb=0)
    with WeightFollower(engine, reader, pinned) as follower:
        for version in range(3):
            if version:
                started.publish(version)
                follower.wait(version, 20)
            # The prefilling side takes its own time to switch; what it refuses until then is prefilled here.
            adopted = engine.handoffs.adopted
            for _ in range(50):
                made = {
                    i: Request(p, Sampling(max_tokens=6, ignore_eos=True), key=i)
                    for i, p in enumerate(PROMPTS)
                }
                for number, request in made.items():
                    request.submit(engine, number)
                events: list[TokenEvent] = []
                finish(engine, events)
                for event in events:
                    made[event.request_id].record(event)  # type: ignore[index]
                for request in made.values():
                    check_request(request, "float32")
                    assert set(request.versions) == {version}
                if engine.handoffs.adopted > adopted:
                    break
            assert engine.handoffs.adopted > adopted
    end(engine)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_process_costs_time_only(
    started: Started, death: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """The last of those that need the processes."""
    if death == signal.SIGKILL:
        model, version = tiny_model("float32"), started.store.published
        assert version is not None
        set_version(model.module, version.version, "float32")
        pair = Pair(started.follower, model, version.weights_id)
    else:
        pair = Pair(started.folder)
    engine, single = pair.engine(), pair.single()
    engine.deadline_s = 0.3
    step, steps = engine.step, 0

    def step_and_kill() -> list[TokenEvent]:
        nonlocal steps
        steps += 1
        if steps == 2:
            os.kill(engine.prefill.pid, death)
        return step()

    engine.step = step_and_kill  # type: ignore[method-assign]
    assert engine.generate(PROMPTS, GREEDY) == single.generate(PROMPTS, GREEDY)
    engine.step = step  # type: ignore[method-assign]
    assert ("killed by signal 9" if death == signal.SIGKILL else "silent for 0.3 s") in engine.handoffs.reason
    assert engine.handoffs.lost >= 1
    assert len(caplog.records) == 1
    assert engine.generate(PROMPTS[:3], GREEDY) == single.generate(PROMPTS[:3], GREEDY)
    assert len(caplog.records) == 1
    assert not engine.prefill.alive
    assert_clean(engine)


def test_a_process_that_cannot_start_says_why() -> None:
    """`serve` as the process runs it, in a thread: only its start is of interest."""
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    with ours:
        ours.send(
            _Setup("nowhere", "float32", EngineConfig(), 2, torch.get_num_threads(), (), store_name(), None)
        )
        assert ours.poll(20)
        assert ours.recv().reason.startswith("nobody publishes weights")
    thread.join(20)
    assert not thread.is_alive()


class TestPrefiller:
    """The prefilling side by itself."""

    @pytest.fixture
    def prefiller(self) -> Prefiller:
        memory = os.memfd_create("test")
        return Prefiller(tiny_model(), EngineConfig(**SETTINGS), "w0", memory, 2)

    @staticmethod
    def ask(prefiller: Prefiller, number: int, tokens: list[int], weights_id: str = "w0") -> list[Answer]:
        prefiller.add(Prompt(number, packed_tokens(tokens), weights_id))
        answers = []
        while (answer := prefiller.step()) is not None:
            answers.append(answer)
        return answers

    def test_a_chunk_per_step_and_a_slot_until_it_is_dropped(self, prefiller: Prefiller) -> None:
        first = self.ask(prefiller, 1, PROMPTS[0][:100])
        assert first == [Progress(1, 48), Progress(1, 96), Ready(1, 0, 100, "w0")]
        assert self.ask(prefiller, 2, PROMPTS[2][:30]) == [Ready(2, 1, 30, "w0")]
        assert self.ask(prefiller, 3, PROMPTS[3][:30]) == []
        prefiller.drop(1)
        assert prefiller.step() == Ready(3, 0, 30, "w0")

    def test_a_prompt_that_begins_like_one_before_goes_on_from_there(self, prefiller: Prefiller) -> None:
        whole = PROMPTS[0][:100]
        self.ask(prefiller, 1, [*whole[:60], 1, 2, 3])
        self.ask(prefiller, 2, PROMPTS[2][:30])
        for number in (1, 2):
            prefiller.drop(number)
        assert self.ask(prefiller, 3, whole) == [Ready(3, 0, 100, "w0")]
        rows = [t.clone() for t in prefiller.slots.read(0, 0, 100)]
        prefiller.drop(3)
        prefiller.update_weights(0, "other")
        prefiller.update_weights(0, "w0")
        assert len(self.ask(prefiller, 4, whole)) == 3  # nothing is left of the other weights
        for ours, theirs in zip(prefiller.slots.read(0, 0, 100), rows, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

    def test_other_weights_and_long_prompts_are_refused(self, prefiller: Prefiller) -> None:
        assert self.ask(prefiller, 1, PROMPTS[0], "w9") == [Refused(1, "the weights differ")]
        assert self.ask(prefiller, 2, [1] * 256) == [
            Refused(2, "the prompt is longer than its context of 256")
        ]
        prefiller.add(Prompt(3, packed_tokens(PROMPTS[0]), "w0"))
        assert isinstance(prefiller.step(), Progress)
        prefiller.update_weights(1, "w1")
        assert prefiller.step() == Refused(3, "the weights differ")
        assert not prefiller.busy
        assert [slot.owner for slot in prefiller._slots] == [None, None]

    def test_a_promised_prompt_outlives_a_switch(self, prefiller: Prefiller) -> None:
        ready = self.ask(prefiller, 1, PROMPTS[0][:20])[-1]
        before = prefiller.slots.read(0, 0, 20)
        set_version(tiny_model().module, 1)
        prefiller.update_weights(1, "w1")
        self.ask(prefiller, 2, PROMPTS[0][:20], "w1")
        assert ready == Ready(1, 0, 20, "w0")
        assert all(torch.equal(a, b) for a, b in zip(before, prefiller.slots.read(0, 0, 20), strict=True))
