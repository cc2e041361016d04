"""Greedy tokens equal transformers' `generate`, alone and with everything that the engine can do to a batch."""

import pytest
from engine_cases import (
    TOLERANCE,
    Request,
    generate_greedily,
    loaded,
    plain_logprob,
    random_prompt,
    record_plans,
    reference_logits,
    run,
    small_blocks,
)

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.models.attention import ATTENTION
from headrace.types import Sampling

QUESTIONS = (
    "What is the capital of France?",
    "What is 3 + 4? Reply with only the number.",
    "Name three colours.",
    "What is 3 + 5? Reply with only the number.",
)


class Case:
    """A model, prompts of different lengths with shared prefixes, and what `generate` makes of them."""

    def __init__(
        self, name: str, dtype: str, prompts: list[list[int]], max_tokens: int, context: int
    ) -> None:
        self.model = loaded(name, dtype, ATTENTION)
        self.plain = loaded(name, dtype, "sdpa").module
        self.tolerance = TOLERANCE[self.model.dtype]
        self.prompts = prompts
        self.context = context
        self.sampling = Sampling(temperature=0, max_tokens=max_tokens)
        self.expected = [generate_greedily(self.plain, prompt, max_tokens) for prompt in prompts]

    def engine(self, **settings: object) -> Engine:
        return Engine(self.model, EngineConfig(context_length=self.context, **settings))

    def check(self, request: Request, number: int) -> None:
        assert request.token_ids == self.expected[number]
        logits = reference_logits(self.plain, request.prompt + request.token_ids)
        for i, (token, logprob) in enumerate(zip(request.token_ids, request.logprobs, strict=True)):
            plain = plain_logprob(logits[len(request.prompt) + i - 1], self.sampling, token)
            assert abs(logprob - plain) < self.tolerance


def tiny_case(dtype: str) -> Case:
    shared = random_prompt(0, 21)
    prompts = [
        shared + random_prompt(1, 6),
        random_prompt(2, 3),
        shared + random_prompt(3, 9),
        random_prompt(4, 30),
        [7],
        list(shared),
    ]
    return Case("tiny-random", dtype, prompts, max_tokens=20, context=56)


def smollm2_case() -> Case:
    tokenizer = loaded("smollm2-135m", "float32", ATTENTION).tokenizer
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    return Case("smollm2-135m", "float32", prompts, max_tokens=10, context=max(map(len, prompts)) + 12)


@pytest.fixture(
    scope="module", params=["tiny-float64", "tiny-float32", pytest.param("smollm2", marks=pytest.mark.real)]
)
def case(request: pytest.FixtureRequest) -> Case:
    """float64 runs the plain linear layers, float32 the prepacked ones."""
    return smollm2_case() if request.param == "smollm2" else tiny_case(request.param.removeprefix("tiny-"))


def test_alone(case: Case) -> None:
    engine = case.engine(max_sequences=1, prefix_cache_mb=0)
    for number, prompt in enumerate(case.prompts):
        requests = {number: Request(prompt, case.sampling)}
        requests[number].submit(engine, number)
        run(engine, requests)
        case.check(requests[number], number)


def test_mixed_batch_with_chunks_preemption_and_prefix_hits(case: Case) -> None:
    engine = small_blocks(case.engine(max_sequences=4, max_batch_tokens=7))
    engine.slots.capacity_tokens = case.context + case.context // 2
    plans = record_plans(engine)
    requests = {number: Request(prompt, case.sampling) for number, prompt in enumerate(case.prompts)}
    requests |= {
        number + len(requests): Request(prompt, case.sampling) for number, prompt in enumerate(case.prompts)
    }
    # The second half arrives, more urgent, while the first one runs.
    first = len(case.prompts)
    for number in range(first):
        requests[number].submit(engine, number)
    for _ in range(5):
        for event in engine.step():
            requests[event.request_id].record(event)
    for number in range(first, 2 * first):
        requests[number].submit(engine, number, priority=(-1,))
    run(engine, requests)

    for number, request in requests.items():
        case.check(request, number % first)
    assert engine.scheduler.preemptions > 0
    assert engine.cache.hit_tokens > 0
    assert any(plan.decodes and plan.chunks for plan in plans), "no step mixed decodes and chunks"
    parts = [tokens for plan in plans for sequence, tokens in plan.chunks if tokens < sequence.prompt_length]
    assert len(parts) > 2, "no prompt was prefilled in chunks"
    assert max(len(p.decodes) + sum(tokens for _, tokens in p.chunks) for p in plans) <= 7
