"""Quantised rollouts: int8 weights in the engine, for the fused forward and for any other architecture."""

from __future__ import annotations

import math

import pytest
import torch
from engine_cases import loaded, random_prompt, set_version, tiny_model

from headrace import kernels
from headrace.algorithms import effective_sample_size
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.engine.forward import LlamaForward, ModuleForward
from headrace.errors import UserError
from headrace.models.packing import Int8Linear
from headrace.types import Sampling

pytestmark = pytest.mark.kernels


def int8_engine(model=None, **settings) -> Engine:  # type: ignore[no-untyped-def]
    settings = {"context_length": 64, "max_sequences": 4, "weight_format": "int8"} | settings
    return Engine(model or tiny_model("float32"), EngineConfig(**settings), weights_id="w0")


def test_the_identity_of_its_kv_says_so() -> None:
    identity = int8_engine().directory.identity
    assert (identity.weight_format, identity.layout) == ("int8", "slot-rows bfloat16")


def test_another_precision_or_plain_layers_are_refused() -> None:
    with pytest.raises(UserError, match="float32 model on the CPU"):
        int8_engine(tiny_model("float64"))


def test_without_kernels_it_is_refused_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unavailable_reason", lambda: "there is no C++ compiler; install g++")
    with pytest.raises(UserError, match="install g\\+\\+"):
        int8_engine()


@pytest.mark.parametrize("kind", [LlamaForward, ModuleForward])
def test_it_is_close_to_the_float_policy_but_another_one(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is ModuleForward:
        monkeypatch.setattr("headrace.engine.forward._llama_shaped", lambda module: False)
    engine = int8_engine()
    assert type(engine.forward) is kind
    if kind is ModuleForward:
        quantised = [m for m in engine.forward.module.modules() if isinstance(m, Int8Linear)]  # type: ignore[attr-defined]
        assert len(quantised) == 7 * 3 + 1
    prompts = [random_prompt(seed, 8) for seed in range(6)]
    outputs = engine.generate(prompts, Sampling(max_tokens=40, ignore_eos=True, n=2))
    exact = loaded("tiny-random", "float32", "sdpa").module
    ours, theirs = [], []
    for output in outputs:
        for item in output.samples:
            ids = output.prompt_ids + item.token_ids
            with torch.no_grad():
                logp = torch.log_softmax(exact(input_ids=torch.tensor([ids])).logits[0].double(), -1)
            first = len(output.prompt_ids)
            theirs += [float(logp[first + i - 1, token]) for i, token in enumerate(item.token_ids)]
            ours += item.logprobs
    difference = (torch.tensor(ours) - torch.tensor(theirs)).abs()
    assert 1e-4 < difference.max() < 1
    assert effective_sample_size(torch.tensor(theirs), torch.tensor(ours)) > 0.9


def test_publishing_quantises_the_new_weights() -> None:
    engine = int8_engine()
    prompt, sampling = random_prompt(1, 8), Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    before = engine.generate([prompt], sampling)[0].samples[0]
    set_version(engine.model.module, 1, "float32")
    engine.update_weights(1, "w1")
    changed = engine.generate([prompt], sampling)[0].samples[0]
    fresh = int8_engine(engine.model)
    assert fresh.generate([prompt], sampling)[0].samples[0].token_ids[:4] == changed.token_ids[:4]
    assert changed.token_ids != before.token_ids
    set_version(engine.model.module, 0, "float32")
    engine.update_weights(2, "w0 again")
    again = engine.generate([prompt], sampling)[0].samples[0]
    assert again.token_ids == before.token_ids
    assert again.logprobs == before.logprobs


@pytest.mark.parametrize("weight_format", ["float32", "int8"])
def test_samples_are_the_same_bits_in_any_batch(weight_format: str) -> None:
    """Other batches, chunk sizes, preemption and prefix hits change neither tokens nor log-probs, in float32 too."""
    prompts = [random_prompt(seed, 5 + 3 * seed) for seed in range(6)]
    sampling = Sampling(max_tokens=12, ignore_eos=True, n=2)
    alone = int8_engine(weight_format=weight_format, max_sequences=1, prefix_cache_mb=0)
    expected = [alone.generate([prompt], sampling)[0].samples for prompt in prompts]
    for settings in (
        {"max_sequences": 12},
        {"max_sequences": 5, "max_batch_tokens": 7},
        {"max_sequences": 12, "prefix_cache_mb": 0, "max_batch_tokens": 100},
    ):
        engine = int8_engine(weight_format=weight_format, **settings)
        if settings["max_sequences"] == 5:
            engine.slots.capacity_tokens = 70
        for output, samples in zip(engine.generate(prompts, sampling), expected, strict=True):
            assert [s.token_ids for s in output.samples] == [s.token_ids for s in samples]
            assert [s.logprobs for s in output.samples] == [s.logprobs for s in samples]
        if settings["max_sequences"] == 5:
            assert engine.scheduler.preemptions > 0


@pytest.mark.real
def test_smollm2_survives_it() -> None:
    """Per-token ESS of the importance ratio over text that the quantised policy sampled itself."""
    engine = Engine.load("smollm2-135m", weight_format="int8", context_length=128, max_sequences=16)
    chats = [
        [{"role": "user", "content": text}]
        for text in (
            "What is 3 + 4?",
            "Tell me a story about a fox.",
            "Why is the sky blue?",
            "Name a colour.",
        )
    ]
    outputs = engine.generate(chats, Sampling(max_tokens=48, n=4, ignore_eos=True))
    exact = loaded("smollm2-135m", "float32", "sdpa").module
    ours, theirs = [], []
    for output in outputs:
        for item in output.samples:
            ids = torch.tensor([output.prompt_ids + item.token_ids])
            with torch.no_grad():
                logits = exact(input_ids=ids, logits_to_keep=len(item.token_ids) + 1).logits[0, :-1]
            logp = torch.log_softmax(logits.double(), -1)
            theirs += logp.gather(1, torch.tensor(item.token_ids)[:, None]).flatten().tolist()
            ours += item.logprobs
    share = effective_sample_size(torch.tensor(theirs), torch.tensor(ours))
    assert len(ours) == 4 * 4 * 48
    assert math.isfinite(share)
    assert share > 0.85
