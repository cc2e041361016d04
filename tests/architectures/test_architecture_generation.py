"""Every architecture's greedy tokens through the engine equal `generate` with transformers' eager attention."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import pytest
from engine_cases import (
    Request,
    generate_greedily,
    plain_logprob,
    random_prompt,
    reference_logits,
    run,
    small_blocks,
    step,
)

from architectures import ARCHITECTURES, for_engine, plain_module
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine.attention import SlotAttention
from headrace.models import kv_bytes_per_token
from headrace.models.load import DTYPES
from headrace.types import Sampling

CONTEXT = 48
MAX_TOKENS = 18
TOLERANCE = 1e-5
"""Eager attention and the norms of transformers round to float32, also in a float64 model."""

_SHARED = random_prompt(60, 12)
PROMPTS = [[*_SHARED, 1, 2, 3], [5], [*_SHARED, 9], random_prompt(61, 20)]
"""Shorter and longer than every window, two with a common beginning."""


def make_engine(name: str, **settings: int) -> Engine:
    config = EngineConfig(context_length=CONTEXT, max_sequences=4, **settings)
    return Engine(for_engine(plain_module(name)), config)


def greedy(prompt: list[int]) -> Request:
    return Request(prompt, Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True))


def run_mixed(name: str) -> list[Request]:
    """All prompts at once, in small chunks, with shared prefixes and too little memory."""
    engine = make_engine(name, max_batch_tokens=5)
    engine.slots.capacity_tokens = CONTEXT + 20
    small_blocks(engine)
    made = {i: greedy(prompt) for i, prompt in enumerate(PROMPTS)}
    for i, request in made.items():
        request.submit(engine, i)
        step(engine, made)
    run(engine, made)
    assert engine.scheduler.preemptions > 0
    assert engine.cache.hit_tokens > 0
    return list(made.values())


@lru_cache
def expected_tokens(name: str) -> list[list[int]]:
    return [generate_greedily(plain_module(name), prompt, MAX_TOKENS) for prompt in PROMPTS]


def check(name: str, requests: list[Request]) -> None:
    for request, expected in zip(requests, expected_tokens(name), strict=True):
        assert request.token_ids == expected
        logits = reference_logits(plain_module(name), request.prompt + expected)
        for i, (token, logprob) in enumerate(zip(expected, request.logprobs, strict=True)):
            row = logits[len(request.prompt) + i - 1]
            assert abs(logprob - plain_logprob(row, request.sampling, token)) < TOLERANCE


def test_alone(name: str) -> None:
    engine = make_engine(name, prefix_cache_mb=0)
    requests = [greedy(prompt) for prompt in PROMPTS]
    for i, request in enumerate(requests):
        request.submit(engine, i)
        run(engine, {i: request})
    check(name, requests)
    assert len({tuple(request.token_ids) for request in requests}) > 1


def test_in_a_mixed_batch(name: str) -> None:
    check(name, run_mixed(name))


def test_every_option_reaches_the_attention_and_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of them the numbers are others, so the comparisons above do test it."""
    attend = SlotAttention.attend
    seen: set[str] = set()
    expected = run_mixed(name)
    for option in ("sliding_window", "softcap", "sinks", "selection"):

        def without(self, layer, query, key, value, options, option=option):  # type: ignore[no-untyped-def]
            if getattr(options, option) is not None:
                seen.add(option)
            return attend(self, layer, query, key, value, dataclasses.replace(options, **{option: None}))

        monkeypatch.setattr(SlotAttention, "attend", without)
        differs = any(
            abs(a - b) > 1e-3
            for request, other in zip(run_mixed(name), expected, strict=True)
            for a, b in zip(request.logprobs, other.logprobs, strict=True)
        )
        assert differs == (option in seen), option
    assert seen == ARCHITECTURES[name].options


def test_memory_is_what_the_configuration_promises(name: str) -> None:
    engine = make_engine(name)
    config = ARCHITECTURES[name].config()
    assert {d: kv_bytes_per_token(config, d) for d in DTYPES} == {
        d: engine.kv_bytes_per_token * size // DTYPES["float64"] for d, size in DTYPES.items()
    }


def test_unequal_keys_and_values_have_buffers_of_their_own() -> None:
    engine = make_engine("deepseek-v3")
    shapes = [(s.heads, s.key_dim, s.value_heads, s.value_dim) for s in engine.slots.shapes]
    assert shapes == [(4, 12, 4, 6)] * 2
