from pathlib import Path

import pytest

from headrace.models import LoadedModel, load_model, resolve


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    return resolve("tiny-random")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LoadedModel:
    return load_model(tiny_path, "float32")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve("smollm2-135m")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, to see what is written there."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def tiny_gguf(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-random as a GGUF file with float32 tensors, written as llama.cpp's converter does.

    It has one more token, "Āā": the result of its only merge, because a file needs a merge.
    """
    import numpy as np
    from gguf import GGUFWriter, TokenType

    file = tmp_path_factory.mktemp("gguf") / "tiny model.gguf"
    config = tiny.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size + 1)
    tokens = [*tiny.tokenizer.convert_ids_to_tokens(list(range(config.vocab_size))), "Āā"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2\0")  # as long as "smollm", which a test writes over it
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 3 + [TokenType.NORMAL])
    writer.add_token_merges(["Ā ā"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template(tiny.tokenizer.chat_template)

    weights = {name: weight.detach().numpy() for name, weight in tiny.module.state_dict().items()}

    def one_more(weight: np.ndarray) -> np.ndarray:
        return np.concatenate([weight, np.zeros_like(weight[:1])])

    def rotated(weight: np.ndarray, heads: int) -> np.ndarray:
        """llama.cpp keeps the two halves of each head's rotary pairs interleaved."""
        rows, columns = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    writer.add_tensor("token_embd.weight", one_more(weights["model.embed_tokens.weight"]))
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", one_more(weights["lm_head.weight"]))
    for i in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        layer["self_attn.q_proj"] = rotated(layer["self_attn.q_proj"], config.num_attention_heads)
        layer["self_attn.k_proj"] = rotated(layer["self_attn.k_proj"], config.num_key_value_heads)
        for name, gguf_name in {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        }.items():
            writer.add_tensor(f"blk.{i}.{gguf_name}.weight", np.ascontiguousarray(layer[name]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
