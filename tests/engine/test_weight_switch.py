"""Weights that change in place between two steps: what is recomputed, kept, labelled and forgotten."""

import pytest
import torch
from engine_cases import (
    CONTEXT,
    Request,
    assert_clean,
    assert_consistent,
    check_request,
    loaded,
    plain_draw,
    plain_logprob,
    random_prompt,
    reference_logits,
    reference_module,
    run,
    small_blocks,
    step,
    switch,
    tiny_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine.forward import LlamaForward, ModuleForward
from headrace.engine.sampler import uniform
from headrace.models.packing import PackedLinear
from headrace.state.kv import KVIdentity
from headrace.types import Sampling

SHARED = random_prompt(20, 10)
PROMPTS = [SHARED + random_prompt(21, 7), random_prompt(22, 3), SHARED, SHARED + random_prompt(23, 14)]
VERSIONS = 3

switch_times = st.lists(st.integers(0, 12), min_size=1, max_size=VERSIONS)


def requests() -> dict[int, Request]:
    """A greedy one among sampled ones; two requests share each prompt."""
    return {
        i: Request(
            PROMPTS[i % len(PROMPTS)],
            Sampling(temperature=0.0 if i == 2 else 0.6 + 0.2 * i, max_tokens=10 + i, ignore_eos=True),
            key=1000 + i,
        )
        for i in range(2 * len(PROMPTS))
    }


def run_with_switches(engine: Engine, made: dict[int, Request], pauses: list[int]) -> None:
    """Submit everything, and switch to the next version after each pause (in steps)."""
    for number, request in made.items():
        request.submit(engine, number)
    for version, pause in enumerate(pauses, start=1):
        for _ in range(pause):
            step(engine, made)
        assert_consistent(engine)
        switch(engine, version)
        assert_consistent(engine)
    run(engine, made)


@given(
    pauses=switch_times,
    max_sequences=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 40),
    capacity=st.integers(CONTEXT, 3 * CONTEXT),
    cached=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_recompute_makes_every_token_one_of_the_weights_that_it_names(
    pauses: list[int], max_sequences: int, max_batch_tokens: int, capacity: int, cached: bool
) -> None:
    engine = small_blocks(
        tiny_engine(
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
            prefix_cache_mb=int(cached),
        )
    )
    made = requests()
    run_with_switches(engine, made, pauses)
    for request in made.values():
        check_request(request)
        assert not any(request.mixed)
        assert request.versions == sorted(request.versions)


def test_versions_change_exactly_at_the_switch() -> None:
    engine = tiny_engine()
    request = Request(PROMPTS[0], Sampling(max_tokens=12, ignore_eos=True), key=5)
    request.submit(engine, "a")
    for version in range(1, 4):
        for _ in range(version):
            step(engine, {"a": request})
        switch(engine, version)
        assert (engine.version, engine.weights_id) == (version, f"w{version}")
    run(engine, {"a": request})
    assert request.versions == [0] + [1] * 2 + [2] * 3 + [3] * 6
    check_request(request)


def test_the_weights_of_the_versions_really_differ() -> None:
    """Otherwise nothing in this file could fail."""
    logits = [reference_logits(reference_module(v), PROMPTS[0])[-1] for v in range(VERSIONS + 1)]
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert float((a - b).abs().max()) > 0.3


@given(
    pauses=switch_times,
    max_sequences=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 40),
    capacity=st.integers(CONTEXT, 3 * CONTEXT),
)
@settings(max_examples=15, deadline=None)
def test_keep_labels_exactly_the_tokens_over_older_kv(
    pauses: list[int], max_sequences: int, max_batch_tokens: int, capacity: int
) -> None:
    """A running sequence is labelled from the switch until its KV is computed anew. What is not labelled is pure."""
    engine = small_blocks(
        tiny_engine(
            kv_on_update="keep",
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
        )
    )
    made = requests()
    for number, request in made.items():
        request.submit(engine, number)
    carried: set[int] = set()
    pauses = list(pauses)
    for version in range(1, len(pauses) + 1):
        _steps_with_labels(engine, made, carried, pauses[version - 1])
        switch(engine, version)
        carried |= {s.request_id for s in engine.scheduler.running if s.computed}
        assert {s.request_id for s in engine.scheduler.running if s.mixed} == carried
    _steps_with_labels(engine, made, carried, 5000)
    assert_clean(engine)
    for request in made.values():
        assert request.finish_reason == "length"
        _check_unlabelled(request)


def _steps_with_labels(engine: Engine, made: dict[int, Request], carried: set[int], count: int) -> None:
    """Steps in which every token's label is compared with `carried`: who holds KV of older weights."""
    for _ in range(count):
        if not engine.num_unfinished:
            return
        given_up = _preempted_in(engine, lambda: step(engine, made), carried, made)
        carried -= given_up
        carried &= {s.request_id for s in engine.scheduler.running}
        assert_consistent(engine)


def _preempted_in(engine: Engine, action, carried: set[int], made: dict[int, Request]) -> set[int]:  # type: ignore[no-untyped-def]
    """Run a step; returns who was preempted in it. Tokens of the others are labelled as `carried` says."""
    preempted: set[int] = set()
    preempt = engine.scheduler.preempt

    def recorded(sequence) -> None:  # type: ignore[no-untyped-def]
        preempted.add(sequence.request_id)
        preempt(sequence)

    engine.scheduler.preempt = recorded  # type: ignore[method-assign]
    try:
        events = action()
    finally:
        engine.scheduler.preempt = preempt  # type: ignore[method-assign]
    for event in events:
        assert event.mixed_kv == (event.request_id in carried - preempted)
    return preempted


def _check_unlabelled(request: Request) -> None:
    sequence = request.prompt + request.token_ids
    logits = {v: reference_logits(reference_module(v), sequence) for v in set(request.versions)}
    for i, (token, version) in enumerate(zip(request.token_ids, request.versions, strict=True)):
        if request.mixed[i]:
            continue
        position = len(request.prompt) + i
        row = logits[version][position - 1]
        assert token == plain_draw(row, request.sampling, uniform(request.key, position))
        assert abs(request.logprobs[i] - plain_logprob(row, request.sampling, token)) < 1e-9


def test_keep_goes_on_over_the_old_kv() -> None:
    """The kept KV, replayed with transformers' own cache: prefilled by version 0, continued by version 1."""
    engine = tiny_engine(kv_on_update="keep", prefix_cache_mb=0)
    sampling = Sampling(temperature=0.9, max_tokens=10, ignore_eos=True)
    request = Request(PROMPTS[0], sampling, key=3)
    request.submit(engine, "a")
    for _ in range(4):
        step(engine, {"a": request})
    switch(engine, 1)
    run(engine, {"a": request})
    assert request.versions == [0] * 4 + [1] * 6
    assert request.mixed == [False] * 4 + [True] * 6

    cache = DynamicCache()
    fed = 0
    for i, (token, version) in enumerate(zip(request.token_ids, request.versions, strict=True)):
        sequence = request.prompt + request.token_ids[:i]
        with torch.no_grad():
            output = reference_module(version)(
                input_ids=torch.tensor([sequence[fed:]]), cache=cache, use_cache=True
            )
        fed = len(sequence)
        row = output.logits[0, -1]
        assert token == plain_draw(row, sampling, uniform(3, fed))
        assert request.logprobs[i] == pytest.approx(plain_logprob(row, sampling, token), abs=1e-9)
    pure = reference_logits(reference_module(1), request.prompt + request.token_ids)
    last = len(request.prompt) + len(request.token_ids) - 2
    assert abs(plain_logprob(pure[last], sampling, request.token_ids[-1]) - request.logprobs[-1]) > 1e-4


def test_kept_kv_never_enters_the_prefix_cache() -> None:
    """A prompt whose prefill began under older weights is not shared with anybody."""
    engine = small_blocks(tiny_engine(kv_on_update="keep", max_batch_tokens=4, max_sequences=4))
    made = {i: Request(PROMPTS[3], Sampling(max_tokens=6, ignore_eos=True), key=i) for i in range(2)}
    made[0].submit(engine, 0)
    step(engine, made)
    assert 0 < engine.scheduler.running[0].computed < len(PROMPTS[3])
    switch(engine, 1)
    while not made[0].token_ids:
        step(engine, made)
    assert engine.cache.used_bytes == 0
    made[1].submit(engine, 1)
    run(engine, made)
    assert made[0].mixed == [True] * 6
    assert made[1].mixed == [False] * 6
    check_request(made[1])


@given(pauses=switch_times, mode=st.sampled_from(["recompute", "keep"]), back=st.booleans())
@settings(max_examples=12, deadline=None)
def test_no_prefix_of_older_weights_is_ever_hit(pauses: list[int], mode: str, back: bool) -> None:
    """The cache is warm at every switch; what starts afterwards equals an engine that has no cache."""
    engines = {
        size: small_blocks(tiny_engine(kv_on_update=mode, prefix_cache_mb=size, max_batch_tokens=16))
        for size in (0, 1)
    }
    results = {}
    for size, engine in engines.items():
        made: dict[tuple[int, int], Request] = {}
        versions = [*range(1, len(pauses) + 1), *([0] if back else [])]
        for round_number, version in enumerate([0, *versions]):
            if round_number:
                # All that ran before has ended: the next round meets nothing but the cache.
                run(engine, made)
                switch(engine, version)
                assert engine.cache.used_bytes == 0
            for i in range(len(PROMPTS)):
                request = Request(
                    PROMPTS[i], Sampling(max_tokens=5, ignore_eos=True), key=10 * round_number + i
                )
                made[round_number, i] = request
                request.submit(engine, (round_number, i))
        run(engine, made)
        for request in made.values():
            check_request(request)
        results[size] = {key: request.token_ids for key, request in made.items()}
    assert results[0] == results[1]
    assert engines[1].cache.hit_tokens > 0
    assert engines[0].cache.hit_tokens == 0


def test_the_same_weights_id_keeps_the_kv_and_the_cache() -> None:
    """A step that changed nothing (all advantages zero) publishes a version, not new weights."""
    engine = tiny_engine()
    made = {0: Request(PROMPTS[0], Sampling(max_tokens=6, ignore_eos=True), key=1)}
    made[0].submit(engine, 0)
    step(engine, made)
    held = engine.cache.used_bytes
    computed = engine.scheduler.running[0].computed
    assert held > 0
    engine.update_weights(1, "w0")
    assert engine.cache.used_bytes == held
    assert engine.scheduler.running[0].computed == computed
    run(engine, made)
    assert made[0].versions == [0] + [1] * 5
    assert not any(made[0].mixed)


def test_the_identity_names_weights_format_and_layout() -> None:
    engine = tiny_engine()
    assert engine.directory.identity == KVIdentity("w0", "float64", "", "slot-rows float64")


@pytest.mark.parametrize("kind", [pytest.param(LlamaForward, marks=pytest.mark.kernels), ModuleForward])
def test_prepacked_weights_follow_the_change(kind: type) -> None:
    """float32 holds packed copies of the linear weights; without repacking they would still be the old ones."""
    engine = tiny_engine("float32", max_batch_tokens=16)
    if kind is ModuleForward:
        engine.forward = engine.runner.forward = ModuleForward(engine.model.module, prepack=True)
        packed = [layer for layer in engine.forward.module.modules() if isinstance(layer, PackedLinear)]
        assert len(packed) == 7 * 3 + 1
    assert type(engine.forward) is kind
    made = requests()
    for number, request in made.items():
        request.submit(engine, number)
    for version in (1, 2):
        for _ in range(4):
            step(engine, made)
        switch(engine, version, "float32")
    run(engine, made)
    assert {version for request in made.values() for version in request.versions} == {0, 1, 2}
    for request in made.values():
        sequence = request.prompt + request.token_ids
        logits = {
            v: reference_logits(reference_module(v, "float32"), sequence) for v in set(request.versions)
        }
        for i, (token, version) in enumerate(zip(request.token_ids, request.versions, strict=True)):
            row = logits[version][len(request.prompt) + i - 1]
            assert abs(request.logprobs[i] - plain_logprob(row, request.sampling, token)) < 1e-4


def test_the_replica_shares_the_parameters() -> None:
    """Two copies of the linear weights (plain and packed), one of everything else."""
    engine = tiny_engine("float32")
    replica = ModuleForward(engine.model.module, prepack=True).module
    originals = dict(engine.model.module.named_parameters())
    for name, parameter in replica.named_parameters():
        assert parameter is originals[name]
    assert engine.model.module is not loaded("tiny-random", "float32", "headrace").module


@pytest.mark.real
def test_smollm2_follows_a_switch_and_goes_back() -> None:
    """The tied head is packed too. Weights are changed, published, and restored."""
    model = loaded("smollm2-135m", "float32", "headrace")
    engine = Engine(model, EngineConfig(max_sequences=2, context_length=64), weights_id="w0")
    prompt = model.tokenizer("The capital of France is")["input_ids"]
    sampling = Sampling(temperature=0, max_tokens=3)
    before = engine.generate([prompt], sampling)[0].samples[0]
    norm, down = model.module.model.norm.weight, model.module.model.layers[0].mlp.down_proj.weight
    plain = loaded("smollm2-135m", "float32", "sdpa").module
    saved = [(weight, weight.detach().clone()) for weight in (norm, down)]
    try:
        with torch.no_grad():
            norm.mul_(0.5)
            down.mul_(-1.0)
        engine.update_weights(1, "w1")
        changed = engine.generate([prompt], sampling)[0].samples[0]
        assert changed.versions == [1] * len(changed.versions)
        plain_norm, plain_down = plain.model.norm.weight, plain.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            plain_norm.mul_(0.5)
            plain_down.mul_(-1.0)
            logits = reference_logits(plain, prompt + changed.token_ids)
            plain_norm.mul_(2.0)
            plain_down.mul_(-1.0)
        for i, (token, logprob) in enumerate(zip(changed.token_ids, changed.logprobs, strict=True)):
            assert abs(logprob - plain_logprob(logits[len(prompt) + i - 1], sampling, token)) < 1e-4
        assert changed.logprobs[0] != pytest.approx(before.logprobs[0], abs=1e-2)
    finally:
        with torch.no_grad():
            for weight, value in saved:
                weight.copy_(value)
    engine.update_weights(2, "w0-again")
    after = engine.generate([prompt], sampling)[0].samples[0]
    assert after.token_ids == before.token_ids
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
