"""Models, weights and plain references that the engine's tests share.

A *reference* never touches the engine: it is the same architecture with transformers' own attention, called on
whole sequences, and a transcription of what sampling means. `check_request` compares every token, log-prob and
version that the engine reported with it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from headrace.config import EngineConfig
from headrace.engine import Engine, TokenEvent
from headrace.engine.sampler import uniform
from headrace.engine.scheduler import Plan
from headrace.models import LoadedModel, load_model, resolve
from headrace.models.attention import ATTENTION
from headrace.types import Sampling

CONTEXT = 64
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@lru_cache
def loaded(name: str, dtype: str, attention: str) -> LoadedModel:
    model = load_model(resolve(name), dtype=dtype, attn_implementation=attention)
    if dtype == "float64":
        _truly_float64(model.module)
    return model


def _truly_float64(module: nn.Module) -> None:
    """transformers' RMSNorm rounds to float32 even in a float64 model, which would hide errors up to 1e-7."""
    for name, child in module.named_children():
        if isinstance(child, LlamaRMSNorm):
            norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=child.weight.dtype)
            norm.weight = child.weight
            setattr(module, name, norm)
        else:
            _truly_float64(child)


def tiny_model(dtype: str = "float64") -> LoadedModel:
    """tiny-random with parameters of its own, so that a test may change them."""
    shared = loaded("tiny-random", dtype, ATTENTION)
    return dataclasses.replace(shared, module=copy.deepcopy(shared.module))


def tiny_engine(dtype: str = "float64", capacity: int | None = None, **settings: object) -> Engine:
    """An engine over tiny-random; `capacity` is the number of KV tokens of all sequences together."""
    settings = {"context_length": CONTEXT, "max_sequences": 4, "prefix_cache_mb": 1} | settings
    engine = Engine(tiny_model(dtype), EngineConfig(**settings), weights_id="w0")
    if capacity is not None:
        assert capacity >= engine.context_length
        engine.slots.capacity_tokens = capacity
    return engine


def small_blocks(engine: Engine, block_size: int = 4) -> Engine:
    """Make prefixes of a few tokens worth caching."""
    engine.cache.block_size = block_size
    return engine


def set_version(module: nn.Module, version: int, dtype: str = "float64") -> None:
    """Give tiny-random's parameters the values of a version, in place; version 0 is what was loaded."""
    original = loaded("tiny-random", dtype, ATTENTION).module
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for weight, base in zip(module.parameters(), original.parameters(), strict=True):
            noise = torch.randn(base.shape, generator=generator, dtype=base.dtype)
            weight.copy_(base if version == 0 else base + 0.5 * base.std() * noise)


def switch(engine: Engine, version: int, dtype: str = "float64") -> None:
    """Change the shared parameters in place and publish them."""
    set_version(engine.model.module, version, dtype)
    engine.update_weights(version, f"w{version}")


@lru_cache
def reference_module(version: int = 0, dtype: str = "float64") -> nn.Module:
    """tiny-random at a version, with transformers' own attention (the eager one takes its softmax in float32)."""
    module = copy.deepcopy(loaded("tiny-random", dtype, "sdpa").module)
    set_version(module, version, dtype)
    return module


@torch.no_grad()
def reference_logits(module: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """[N, V] of a plain forward over the whole sequence."""
    return module(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def generate_greedily(module: nn.Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' `generate(do_sample=False)` adds to the prompt."""
    ids = torch.tensor([list(prompt)])
    output = module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, use_cache=True
    )
    return output[0, len(prompt) :].tolist()


def plain_distribution(logits: Tensor, sampling: Sampling) -> list[float]:
    """Probabilities [V] after temperature, top-k and top-p, written down from their definitions."""
    if sampling.temperature == 0:
        best = int(logits.argmax())
        return [float(i == best) for i in range(len(logits))]
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total = math.fsum(probabilities[i] for i in ranked)
    kept: set[int] = set()
    reached = 0.0
    for i in ranked:
        kept.add(i)
        reached += probabilities[i] / total
        if sampling.top_p < 1 and reached >= sampling.top_p:
            break
    mass = math.fsum(probabilities[i] for i in kept)
    return [p / mass if i in kept else 0.0 for i, p in enumerate(probabilities)]


def plain_draw(logits: Tensor, sampling: Sampling, u: float) -> int:
    """The first id at which the cumulative distribution passes `u`."""
    reached, last = 0.0, -1
    for i, probability in enumerate(plain_distribution(logits, sampling)):
        if probability > 0:
            reached, last = reached + probability, i
            if reached > u:
                return i
    return last


def plain_logprob(logits: Tensor, sampling: Sampling, token_id: int) -> float:
    temperature = sampling.temperature or 1.0
    return float(torch.log_softmax(logits / temperature, dim=-1)[token_id])


@dataclass(slots=True)
class Request:
    """What was asked for and what the engine reported for it."""

    prompt: list[int]
    sampling: Sampling
    key: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    finish_reason: str | None = None

    def submit(self, engine: Engine, request_id: Hashable, priority: tuple[int, ...] = (0,)) -> None:
        engine.submit(request_id, self.prompt, self.sampling, random_key=self.key, priority=priority)

    def record(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "a token after the last one"
        self.token_ids.append(event.token_id)
        self.logprobs.append(event.logprob)
        self.versions.append(event.version)
        self.mixed.append(event.mixed_kv)
        self.finish_reason = event.finish_reason


def step(engine: Engine, requests: dict[Hashable, Request]) -> list[TokenEvent]:
    events = engine.step()
    assert len({event.request_id for event in events}) == len(events)
    for event in events:
        requests[event.request_id].record(event)
    return events


def run(engine: Engine, requests: dict[Hashable, Request], max_steps: int = 5000) -> None:
    """Step until everything ended; a bound instead of a hang."""
    for _ in range(max_steps):
        if not engine.num_unfinished:
            assert_clean(engine)
            return
        step(engine, requests)
    raise AssertionError(f"{engine.num_unfinished} requests did not end within {max_steps} steps")


def check_request(request: Request, dtype: str = "float64") -> None:
    """Every token is what a plain forward of the weights of its version says, given the tokens before it."""
    tolerance = TOLERANCE[getattr(torch, dtype)]
    sequence = request.prompt + request.token_ids
    logits = {v: reference_logits(reference_module(v, dtype), sequence) for v in set(request.versions)}
    for i, (token, logprob, version) in enumerate(
        zip(request.token_ids, request.logprobs, request.versions, strict=True)
    ):
        position = len(request.prompt) + i
        row = logits[version][position - 1]
        assert token == plain_draw(row, request.sampling, uniform(request.key, position)), f"token {i}"
        assert abs(logprob - plain_logprob(row, request.sampling, token)) < tolerance, f"log-prob {i}"


def record_plans(engine: Engine) -> list[Plan]:
    """The plans of all steps from now on, as copies."""
    plans: list[Plan] = []
    plan_step = engine.scheduler.plan

    def plan() -> Plan:
        made = plan_step()
        plans.append(Plan(list(made.decodes), list(made.chunks)))
        return made

    engine.scheduler.plan = plan  # type: ignore[method-assign]
    return plans


def assert_clean(engine: Engine) -> None:
    """Nothing is left of any request but the prefix cache."""
    assert engine.num_unfinished == 0
    assert engine.scheduler.running == []
    assert engine.scheduler.waiting == []
    assert engine.slots.used == 0
    assert engine.slots.reserved_tokens == 0
    assert engine._detokenizers == {}
    engine.cache.check_integrity()


def assert_consistent(engine: Engine) -> None:
    """The invariants of scheduler and slots that hold between any two calls."""
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    assert sorted(s.slot for s in running) == list(range(engine.slots.used))
    assert engine.slots.used <= engine.slots.max_sequences
    assert engine.slots.reserved_tokens <= engine.slots.capacity_tokens
    for sequence in running:
        assert 0 <= sequence.computed < len(sequence.token_ids) < engine.context_length
        assert sequence.computed <= engine.slots.lengths[sequence.slot] <= len(sequence.token_ids)
    for sequence in waiting:
        assert sequence.slot is None
        assert sequence.computed == 0
        assert not sequence.mixed
    ids = [s.request_id for s in (*running, *waiting)]
    assert len(set(ids)) == len(ids) == engine.num_unfinished
    engine.cache.check_integrity()


def random_prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()
