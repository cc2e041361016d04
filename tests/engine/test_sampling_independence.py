"""The same seed gives the same tokens, whatever shares the batch, arrives when, or is cached (float64)."""

import pytest
from engine_cases import (
    CONTEXT,
    Request,
    check_request,
    random_prompt,
    run,
    small_blocks,
    step,
    tiny_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import random_key
from headrace.types import Sampling

SHARED = random_prompt(10, 13)
PROMPTS = [SHARED + random_prompt(11, 5), random_prompt(12, 2), SHARED, SHARED + random_prompt(13, 12), [65]]
SAMPLINGS = [
    Sampling(temperature=1.0, max_tokens=12, ignore_eos=True),
    Sampling(temperature=0.7, max_tokens=9, top_k=5),
    Sampling(temperature=1.6, max_tokens=14, top_p=0.8),
    Sampling(temperature=1.2, max_tokens=10, top_k=20, top_p=0.6),
    Sampling(temperature=0.0, max_tokens=8),
]


def requests() -> dict[int, Request]:
    """Two samples of every prompt, under all kinds of sampling."""
    made = {}
    for i, prompt in enumerate(PROMPTS):
        for j in range(2):
            number = 2 * i + j
            made[number] = Request(prompt, SAMPLINGS[(i + j) % len(SAMPLINGS)], random_key(7, i, j))
    return made


@pytest.fixture(scope="module")
def alone() -> dict[int, Request]:
    """Every request in an engine of its own, without a prefix cache; checked against plain forwards."""
    made = requests()
    engine = tiny_engine(max_sequences=1, prefix_cache_mb=0)
    for number, request in made.items():
        request.submit(engine, number)
        run(engine, {number: request})
        check_request(request)
    return made


@given(
    order=st.permutations(range(2 * len(PROMPTS))),
    arrivals=st.lists(st.integers(0, 6), min_size=2 * len(PROMPTS), max_size=2 * len(PROMPTS)),
    max_sequences=st.integers(1, 8),
    max_batch_tokens=st.integers(1, 40),
    cached=st.booleans(),
    block_size=st.integers(1, 8),
    capacity=st.integers(CONTEXT, 4 * CONTEXT),
)
@settings(max_examples=25, deadline=None)
def test_tokens_do_not_depend_on_the_batch(
    alone: dict[int, Request],
    order: list[int],
    arrivals: list[int],
    max_sequences: int,
    max_batch_tokens: int,
    cached: bool,
    block_size: int,
    capacity: int,
) -> None:
    engine = tiny_engine(
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        prefix_cache_mb=1 if cached else 0,
        capacity=capacity,
    )
    small_blocks(engine, block_size)
    made = requests()
    for number, pause in zip(order, arrivals, strict=True):
        for _ in range(pause):
            step(engine, made)
        made[number].submit(engine, number)
    run(engine, made)
    for number, request in made.items():
        assert request.token_ids == alone[number].token_ids
        assert request.finish_reason == alone[number].finish_reason
        assert request.logprobs == pytest.approx(alone[number].logprobs, abs=1e-9)


@given(
    max_sequences=st.integers(1, 8),
    max_batch_tokens=st.integers(1, 30),
    cached=st.booleans(),
    order=st.permutations(range(3)),
    seed=st.integers(0, 2),
)
@settings(max_examples=15, deadline=None)
def test_generate_does_not_depend_on_the_batch(
    max_sequences: int, max_batch_tokens: int, cached: bool, order: list[int], seed: int
) -> None:
    """Same call, other engine and order: the n samples of each prompt are the same ones."""
    sampling = Sampling(temperature=1.1, max_tokens=8, n=4, seed=seed)
    expected = tiny_engine(max_sequences=1, prefix_cache_mb=0).generate(PROMPTS[:3], sampling)
    engine = small_blocks(
        tiny_engine(
            max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, prefix_cache_mb=int(cached)
        )
    )
    outputs = engine.generate([PROMPTS[i] for i in order], sampling)
    for i, output in zip(order, outputs, strict=True):
        assert [s.token_ids for s in output.samples] == [s.token_ids for s in expected[i].samples]
        assert [s.text for s in output.samples] == [s.text for s in expected[i].samples]


def test_samples_differ_from_each_other() -> None:
    """Other samples, a repeated prompt and another seed have randomness of their own."""
    engine = tiny_engine()
    sampling = Sampling(temperature=1.0, max_tokens=8, n=3, seed=1, ignore_eos=True)
    outputs = engine.generate([PROMPTS[0], PROMPTS[0]], sampling)
    outputs += engine.generate([PROMPTS[0]], Sampling(max_tokens=8, n=3, seed=2, ignore_eos=True))
    samples = [tuple(s.token_ids) for output in outputs for s in output.samples]
    assert len(set(samples)) == 9


@pytest.mark.parametrize("kept", [1, 5, 11])
def test_a_continued_sample_goes_on_as_if_never_interrupted(alone: dict[int, Request], kept: int) -> None:
    """Prompt plus the first tokens, submitted to another engine: the rest is the same."""
    whole = alone[0]
    engine = tiny_engine()
    engine.submit(
        "continued",
        whole.prompt + whole.token_ids[:kept],
        whole.sampling,
        random_key=whole.key,
        prompt_length=len(whole.prompt),
    )
    rest = Request(whole.prompt + whole.token_ids[:kept], whole.sampling, whole.key)
    run(engine, {"continued": rest})
    assert rest.token_ids == whole.token_ids[kept:]
    assert rest.finish_reason == whole.finish_reason
