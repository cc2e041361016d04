"""The fused forward of Llama-shaped models gives the module's own logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.engine.batch import Batch, Chunk
from headrace.engine.forward import LlamaForward, ModuleForward, make_forward
from headrace.engine.slots import KVSlots
from headrace.models.attention import ATTENTION

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = {k: v for k, v in SHAPE.items() if k != "head_dim"} | {"hidden_size": 96}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, biases and tied embeddings": LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, scaled rope": LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral, window of 5": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**QWEN2),
    "qwen2, some windows": Qwen2Config(
        **QWEN2, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE),
}


def build(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    for parameter in module.parameters():  # norms and biases too, or their absence would not show
        nn.init.normal_(parameter.data, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return module


@pytest.mark.kernels
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_fused_equals_the_module_with_decodes_and_chunks_mixed(name: str) -> None:
    module = build(CONFIGS[name])
    fused, plain = make_forward(module), ModuleForward(module, prepack=False)
    assert type(fused) is LlamaForward
    steps = [  # (decode slots, their positions, chunks)
        ([], [], [Chunk(0, 0, 9, 0), Chunk(1, 0, 3, 9), Chunk(2, 0, 1, 12)]),
        ([0, 2], [9, 1], [Chunk(1, 3, 8, 2)]),
        ([0, 1, 2], [10, 8, 2], []),
        ([0, 2], [11, 3], [Chunk(1, 9, 11, 2)]),
    ]
    outputs = []
    for forward in (fused, plain):
        slots = KVSlots(forward.shapes, 3, 32, 96, forward.kv_dtype, torch.device("cpu"))
        generator = torch.Generator().manual_seed(1)
        logits = []
        for decode_slots, positions, chunks in steps:
            places = positions + [p for c in chunks for p in range(c.start, c.stop)]
            tokens = torch.randint(0, 97, (len(places),), generator=generator).tolist()
            outputs_wanted = list(range(0, len(places), 2))
            batch = Batch(tokens, places, decode_slots, chunks, outputs_wanted, [None] * len(decode_slots))
            logits.append(forward(batch, slots))
        outputs.append(logits)
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_other_models_and_precisions_run_as_they_are() -> None:
    assert type(make_forward(build(Phi3Config(**SHAPE)), prepack=True)) is ModuleForward
    assert type(make_forward(build(LlamaConfig(**SHAPE, hidden_act="gelu")), prepack=True)) is ModuleForward
    assert type(make_forward(build(LlamaConfig(**SHAPE)).double(), prepack=True)) is ModuleForward
    assert type(make_forward(build(LlamaConfig(**SHAPE)), prepack=False)) is ModuleForward
