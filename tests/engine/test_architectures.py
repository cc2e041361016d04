"""Architectures with attention of their own: windows, soft caps, sinks, unequal widths of keys and values.

Each is a tiny random model built from transformers' configuration; greedy tokens equal `generate` with eager
attention, in a mixed batch with chunked prefill, preemption and prefix hits.
"""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from engine_cases import (
    Request,
    generate_greedily,
    loaded,
    plain_logprob,
    random_prompt,
    reference_logits,
    run,
    small_blocks,
    step,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine.attention import SlotAttention
from headrace.models import LoadedModel
from headrace.models.attention import ATTENTION
from headrace.types import Sampling

CONTEXT = 48
VOCABULARY = 100
TOLERANCE = 1e-5
"""Eager attention and the norms of transformers round to float32, also in a float64 model."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SIZES, sliding_window=6, head_dim=8),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
    "gpt-oss": GptOssConfig(
        **SIZES,
        head_dim=8,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "deepseek-v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
}


def build(name: str) -> tuple[LoadedModel, nn.Module]:
    """The model as the engine wants it, and the same weights with eager attention."""
    config = copy.deepcopy(CONFIGS[name])
    plain = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    ).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for _, weight in sorted(plain.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            # Attention that is sharp enough for its windows, caps and sinks to matter.
            weight.copy_(
                weight + 0.3 * noise if weight.dim() == 1 else 1.5 * noise * weight.shape[-1] ** -0.5
            )
    module = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        attn_implementation=ATTENTION,
        experts_implementation="eager",
        dtype=torch.float64,
    ).eval()
    module.load_state_dict(plain.state_dict())
    tokenizer = loaded("tiny-random", "float64", ATTENTION).tokenizer
    model = LoadedModel(
        module=module,
        tokenizer=tokenizer,
        path=Path(),
        config=module.config,
        eos_token_ids=(),
        context_length=64,
        dtype=torch.float64,
        device=torch.device("cpu"),
        vocab_size=VOCABULARY,
    )
    return model, plain


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request: pytest.FixtureRequest) -> tuple[str, LoadedModel, nn.Module]:
    return (request.param, *build(request.param))


def run_batch(model: LoadedModel) -> tuple[Engine, list[Request]]:
    """Prompts shorter and longer than every window, in chunks, with shared prefixes and too little memory."""
    engine = Engine(model, EngineConfig(context_length=CONTEXT, max_sequences=4, max_batch_tokens=5))
    engine.slots.capacity_tokens = CONTEXT + 20
    small_blocks(engine)
    shared = [token % VOCABULARY for token in random_prompt(60, 12)]
    prompts = [[*shared, 1, 2, 3], [5], [*shared, 9], [token % VOCABULARY for token in random_prompt(61, 20)]]
    made = {
        i: Request(prompt, Sampling(temperature=0, max_tokens=18, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    }
    for i, request in made.items():
        request.submit(engine, i)
        step(engine, made)
    run(engine, made)
    assert engine.scheduler.preemptions > 0
    assert engine.cache.hit_tokens > 0
    return engine, list(made.values())


def test_greedy_tokens_equal_generate(case: tuple[str, LoadedModel, nn.Module]) -> None:
    _, model, plain = case
    _, requests = run_batch(model)
    for request in requests:
        assert request.token_ids == generate_greedily(plain, request.prompt, 18)
        logits = reference_logits(plain, request.prompt + request.token_ids)
        for i, (token, logprob) in enumerate(zip(request.token_ids, request.logprobs, strict=True)):
            row = logits[len(request.prompt) + i - 1]
            assert abs(logprob - plain_logprob(row, request.sampling, token)) < TOLERANCE


OPTIONS = {
    "mistral": {"sliding_window"},
    "gemma2": {"sliding_window", "softcap"},
    "gemma3": {"sliding_window"},
    "gpt-oss": {"sliding_window", "sinks"},
}


def test_every_option_reaches_the_attention_and_matters(
    case: tuple[str, LoadedModel, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one of them the numbers are others, so the comparison above does test it."""
    name, model, _ = case
    attend = SlotAttention.attend
    seen: set[str] = set()
    _, expected = run_batch(model)
    for option in ("sliding_window", "softcap", "sinks"):

        def without(self, layer, query, key, value, options, option=option):  # type: ignore[no-untyped-def]
            if getattr(options, option) is not None:
                seen.add(option)
            return attend(self, layer, query, key, value, dataclasses.replace(options, **{option: None}))

        monkeypatch.setattr(SlotAttention, "attend", without)
        _, requests = run_batch(model)
        differs = any(
            abs(a - b) > 1e-3
            for request, other in zip(requests, expected, strict=True)
            for a, b in zip(request.logprobs, other.logprobs, strict=True)
        )
        assert differs == (option in seen), option
    assert seen == OPTIONS.get(name, set())


def test_unequal_keys_and_values_have_buffers_of_their_own() -> None:
    model, _ = build("deepseek-v3")
    engine = Engine(model, EngineConfig(context_length=CONTEXT, max_sequences=2))
    assert [(s.heads, s.key_dim, s.value_heads, s.value_dim) for s in engine.slots.shapes] == [
        (4, 12, 4, 6)
    ] * 2
    assert engine.kv_bytes_per_token == 2 * 4 * (12 + 6) * 8
