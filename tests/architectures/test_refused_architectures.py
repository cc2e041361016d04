"""What headrace cannot run is refused by name, with one clear line, before its weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from packing_cases import make_trainer, random_group
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from architectures import SIZES, build, for_engine
from headrace.engine import Engine
from headrace.errors import ModelError
from headrace.models import load_model, resolve

ENCODER_DECODER = "is an encoder-decoder; headrace trains decoder-only language models"
RECURRENT = "keeps a recurrent state (state space or linear attention); not supported"
OTHER_TASK = "is not a causal language model"
NO_INTERFACE = "does not use transformers' attention interface; not supported"


def layers_of(kinds: str) -> str:
    return (
        f"has layers of type {kinds}; headrace runs models whose layers are all full or sliding-window attention, "
        "or the sparse attention of DeepSeek-V3.2 and GLM-5"
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(["bart", "mt5", "t5", "t5gemma", "whisper"], ({}, ENCODER_DECODER)),
    **dict.fromkeys(
        [
            "bailing_hybrid", "bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
            "kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
            "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
        ],
        ({}, RECURRENT),
    ),
    "axk2": ({}, layers_of("indexed_attention")),
    "dots3_note_text": ({}, layers_of("indexed_attention")),
    "hy_v4": ({}, layers_of("indexed_attention")),
    "lfm2": ({"num_hidden_layers": 3, "full_attn_idxs": [2]}, layers_of("conv")),
    "lfm2_moe": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        layers_of("conv"),
    ),
    "llama4": ({}, layers_of("chunked_attention")),
    "llama4_text": ({}, layers_of("chunked_attention")),
    "minimax": ({}, layers_of("linear_attention")),
    "bert": ({"architectures": ["BertForMaskedLM"]}, OTHER_TASK),
    "bloom": ({}, NO_INTERFACE),
    "falcon": ({}, NO_INTERFACE),
    "vit": ({}, f"{OTHER_TASK} in transformers"),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused_by_name(kind: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[kind]
    folder = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))
    CONFIG_MAPPING[kind](**settings).save_pretrained(folder)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    line = str(caught.value)
    assert line.startswith(f"{folder}: ")
    assert kind in line.lower()
    assert line.endswith(reason)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bert", {"is_decoder": False, "pad_token_id": 0}, "BertSelfAttention also attends to later tokens"),
        ("doge", {}, "DogeAttention adds a mask of its own to its attention"),
    ],
)
def test_attention_of_another_kind_is_refused_at_its_first_use(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    """Their configurations do not tell."""
    module = build(CONFIG_MAPPING[kind](**SIZES | settings))
    with pytest.raises(ModelError, match=reason):
        Engine(for_engine(module))
    with pytest.raises(ModelError, match=reason):
        make_trainer(module).token_logprobs(random_group(0, 3, [2]))


def test_a_layer_that_attends_twice_is_refused() -> None:
    """Its second keys would overwrite the first ones in the slot."""
    module = build(CONFIG_MAPPING["diffllama"](**SIZES))
    with pytest.raises(ModelError, match="attends more than once in a forward"):
        Engine(for_engine(module))
