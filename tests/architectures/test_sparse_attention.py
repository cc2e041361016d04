"""Sparse attention far beyond `index_topk` tokens, and the choice of keys against its definition."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from engine_cases import Request, plain_logprob, random_prompt, reference_logits, run, small_blocks, step
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import ARCHITECTURES as ALL
from architectures import INDEXER, SPARSE, for_engine, plain_module
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.errors import ModelError
from headrace.models.attention import ATTENTION, best_keys
from headrace.types import Sampling

CONTEXT = 70
TOP_K = INDEXER["index_topk"]
MAX_TOKENS = 15
_SHARED = random_prompt(70, 30)
PROMPTS = [
    [*_SHARED, *random_prompt(71, 15)],
    [*_SHARED, 4],
    random_prompt(72, 50),
    random_prompt(73, TOP_K - 1),
]
"""One begins below `index_topk` and grows past it."""

sparse = pytest.mark.parametrize("sparse", sorted(name for name in ALL if ALL[name].options == SPARSE))


@sparse
def test_long_contexts_equal_a_forward_without_any_cache(sparse: str) -> None:
    """Prefill in chunks, shared prefixes, preemption, and decoding beside sequences of other lengths."""
    plain = plain_module(sparse)
    engine = Engine(
        for_engine(plain), EngineConfig(context_length=CONTEXT, max_sequences=4, max_batch_tokens=7)
    )
    engine.slots.capacity_tokens = 2 * CONTEXT
    small_blocks(engine)
    sampling = Sampling(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = {i: Request(prompt, sampling) for i, prompt in enumerate(PROMPTS)}
    for i, request in requests.items():
        request.submit(engine, i)
        step(engine, requests)
    run(engine, requests)
    assert engine.scheduler.preemptions > 0
    assert engine.cache.hit_tokens > 0
    for request in requests.values():
        assert len(request.token_ids) == MAX_TOKENS
        logits = reference_logits(plain, request.prompt + request.token_ids)[len(request.prompt) - 1 :]
        for row, token, logprob in zip(logits, request.token_ids, request.logprobs, strict=False):
            assert token == int(row.argmax())
            assert abs(logprob - plain_logprob(row, sampling, token)) < 1e-5


@sparse
def test_an_indexer_that_was_not_taught_is_refused(sparse: str) -> None:
    """It would score the tokens of other sequences."""
    module = copy.deepcopy(plain_module(sparse))
    module.set_attn_implementation(ATTENTION)
    with pytest.raises(ModelError, match="selects keys in a way of its own"):
        Engine(dataclasses.replace(for_engine(module), module=module))


def plain_choice(query: Tensor, key: Tensor, weights: Tensor, mask: Tensor, top_k: int) -> list[list[bool]]:
    """One sequence's choice from the definition: query [H, T, D], key [L, D], weights [H, T], mask [T, L]."""
    chosen = []
    for t in range(query.shape[1]):
        seen = [j for j in range(len(key)) if mask[t, j]]
        score = {
            j: sum(
                float(w) * max(0.0, float(q @ key[j]))
                for w, q in zip(weights[:, t], query[:, t], strict=True)
            )
            for j in seen
        }
        best = sorted(seen, key=lambda j: (-score[j], j))[:top_k]
        chosen.append([j in best for j in range(len(key))])
    return chosen


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 8), st.integers(1, 5), st.integers(1, 9))
def test_best_keys(seed: int, tokens: int, before: int, heads: int, top_k: int) -> None:
    """Small whole numbers: scores are exact, and many of them are equal."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    length = before + tokens
    query, key, weights = numbers(2, heads, tokens, 3), numbers(2, 1, length, 3), numbers(2, heads, tokens, 1)
    mask = torch.ones(tokens, length, dtype=torch.bool).tril(before)
    chosen = best_keys(query, key, weights, mask, top_k)
    if length <= top_k:
        assert chosen is None
        return
    for row in range(2):
        expected = plain_choice(query[row], key[row, 0], weights[row, ..., 0], mask, top_k)
        assert chosen[row, 0].tolist() == expected
    # What stands beside a sequence, hidden by the mask, changes nothing.
    longer = torch.cat([key, numbers(2, 1, 4, 3)], dim=2)
    hidden = torch.cat([mask, torch.zeros(tokens, 4, dtype=torch.bool)], dim=1)
    assert torch.equal(best_keys(query, longer, weights, hidden, top_k)[..., :length], chosen)
