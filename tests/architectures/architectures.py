"""The table of architectures, each a tiny random model built from transformers' own configuration.

A row states what is peculiar to the architecture: the options its layers pass to attention, and how exact it is.
Weights are random and sharp, so that windows, caps, sinks and routers matter to the numbers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from engine_cases import loaded
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.models import LoadedModel
from headrace.models.attention import ATTENTION
from headrace.models.indexer import use_indexers
from headrace.models.load import context_length

CONTEXT = 128
VOCABULARY = 264
"""Some more than the tokens of tiny-random's tokenizer, which every model here borrows."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"]
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        model_type: as config.json names it.
        settings: what differs from `SIZES`.
        options: those of `AttentionOptions` that must reach the attention function.
        exact: whether a float64 model computes in float64 throughout, but for RMS norms and eager attention.
            Those whose routers or layer norms round to float32 do not.
    """

    model_type: str
    settings: dict[str, Any]
    options: frozenset[str] = frozenset()
    exact: bool = True

    def config(self) -> PreTrainedConfig:
        return CONFIG_MAPPING[self.model_type](**SIZES | copy.deepcopy(self.settings))


WINDOW = frozenset({"sliding_window"})
SPARSE = frozenset({"selection"})
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
# Many heads: where all of them score 0, keys tie, and which of those transformers takes is a matter of chance.
INDEXER: dict[str, Any] = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 8}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", {"head_dim": 8}),
    "mistral": Architecture("mistral", {"head_dim": 8, "sliding_window": 6}, WINDOW),
    "mixtral": Architecture("mixtral", {"num_local_experts": 4, "sliding_window": 5}, WINDOW, exact=False),
    "qwen2": Architecture(
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, WINDOW
    ),
    "qwen3": Architecture("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": Architecture(
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        exact=False,
    ),
    "gemma2": Architecture(
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 7,
            "sliding_window": 5,
            "layer_types": MIXED_LAYERS,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
        },
        WINDOW | {"softcap"},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "layer_types": MIXED_LAYERS},
        WINDOW,
    ),
    "glm4": Architecture("glm4", {"head_dim": 8, "rope_parameters": HALF_ROTARY}),
    "glm4-moe": Architecture(
        "glm4_moe",
        {
            "head_dim": 8,
            "use_qk_norm": True,
            "rope_parameters": HALF_ROTARY,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        exact=False,
    ),
    "deepseek-v3": Architecture("deepseek_v3", LATENT, exact=False),
    "deepseek-v3.2": Architecture("deepseek_v32", LATENT | INDEXER, SPARSE, exact=False),
    "glm-moe-dsa": Architecture(
        "glm_moe_dsa",
        LATENT | INDEXER | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
        SPARSE,
        exact=False,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {"head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        exact=False,
    ),
    "phi3": Architecture(
        "phi3",
        {"sliding_window": 6, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
        WINDOW,
    ),
    "olmo2": Architecture("olmo2", {}),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": MIXED_LAYERS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        WINDOW | {"sinks"},
    ),
    "afmoe": Architecture(
        "afmoe",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": MIXED_LAYERS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
        WINDOW,
        exact=False,
    ),
    "cohere": Architecture("cohere", {}, exact=False),
    "gemma": Architecture("gemma", {"head_dim": 8}),
    "gpt2": Architecture("gpt2", {"num_key_value_heads": 4}),
    "gpt-neox": Architecture("gpt_neox", {"num_key_value_heads": 4}),
    "granite": Architecture(
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 1.5,
        },
    ),
    "smollm3": Architecture("smollm3", {"no_rope_layers": [1, 0]}),
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of the configuration in float64, with transformers' eager attention and experts."""
    module = AutoModelForCausalLM.from_config(
        config,
        attn_implementation="eager",
        experts_implementation="eager",  # the fused ones know no float64
        dtype=torch.float64,
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(module.state_dict().items()):
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            # Vectors are scales, biases and sinks; matrices keep the size of what they multiply.
            weight.copy_(
                weight + 0.3 * noise if weight.dim() == 1 else 1.5 * noise * weight.shape[-1] ** -0.5
            )
    return module


@lru_cache
def plain_module(name: str) -> PreTrainedModel:
    """The model of a row. Shared: copy it to change it."""
    return build(ARCHITECTURES[name].config(), seed=sum(map(ord, name)))


def for_engine(plain: PreTrainedModel) -> LoadedModel:
    """A copy of the model as the engine wants it, without an end of sequence."""
    module = copy.deepcopy(plain)
    module.set_attn_implementation(ATTENTION)
    use_indexers(module)
    return LoadedModel(
        module=module,
        tokenizer=loaded("tiny-random", "float64", ATTENTION).tokenizer,
        path=Path(),
        config=module.config,
        eos_token_ids=(),
        context_length=context_length(module.config),
        dtype=torch.float64,
        device=torch.device("cpu"),
        vocab_size=VOCABULARY,
    )


def save_folder(plain: PreTrainedModel, folder: Path) -> Path:
    """Make a model folder in float32 with tiny-random's tokenizer."""
    copy.deepcopy(plain).float().save_pretrained(folder)
    loaded("tiny-random", "float64", ATTENTION).tokenizer.save_pretrained(folder)
    return folder
