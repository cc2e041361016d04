"""Loading: what is loaded is whole and usable; what cannot be used is refused by name, before its weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from headrace.errors import ModelError
from headrace.models import LoadedModel, kv_bytes_per_token, load_model, parameter_count
from headrace.models.attention import AttentionOptions, attention_backend, dense_attention, visible
from headrace.models.load import context_length, read_config


def one_line(path: Path, **arguments: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy of tiny-random to change."""
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_loaded_model(tiny: LoadedModel, tiny_path: Path) -> None:
    assert not tiny.module.training
    assert tiny.path == tiny_path
    assert (tiny.vocab_size, tiny.context_length, tiny.eos_token_ids) == (259, 1024, (258,))
    assert (tiny.dtype, tiny.device) == (torch.float32, torch.device("cpu"))
    assert tiny.config._attn_implementation == "sdpa"
    assert parameter_count(tiny_path) == sum(p.numel() for p in tiny.module.parameters())


def test_dtype_changes_every_weight(tiny_path: Path, tiny: LoadedModel) -> None:
    double = load_model(tiny_path, "float64")
    assert {p.dtype for p in double.module.parameters()} == {torch.float64}
    ids = torch.arange(40).unsqueeze(0)
    torch.testing.assert_close(
        double.module(ids).logits.float(), tiny.module(ids).logits, rtol=1e-4, atol=1e-4
    )


def test_headrace_attention_is_registered(tiny_path: Path) -> None:
    model = load_model(tiny_path, attn_implementation="headrace")
    with pytest.raises(RuntimeError, match="attention_backend"):
        model.module(torch.tensor([[1, 2]]))


def test_loading_is_silent_and_restores_logging(tiny_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load_model(tiny_path)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
        assert capfd.readouterr() == ("", "")
    finally:
        logging.set_verbosity_warning()


def test_eos_ids_are_a_union(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[10, 258])
    edit(folder / "config.json", eos_token_id=7)
    edit(folder / "tokenizer_config.json", eos_token="<|pad|>")
    assert load_model(folder).eos_token_ids == (7, 10, 256, 258)


def test_folder_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_model(folder).eos_token_ids == (258,)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "layers.1.mlp.up_proj" in one_line(folder)


def test_weights_of_another_size(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=32)
    assert "other shapes than its config.json says" in one_line(folder)


def test_tokenizer_of_another_model(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    extra = dict(tokenizer["added_tokens"][0], id=259, content="<|extra|>")
    edit(folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], extra])
    assert "do not belong together" in one_line(folder)


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 1}')
    assert "its tokenizer cannot be loaded" in one_line(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"num_attention_heads": "many"}, "config.json cannot be used"),
    ],
)
def test_refused_folder(changes: dict[str, object], message: str, folder: Path) -> None:
    edit(folder / "config.json", **changes)
    assert message in one_line(folder)


def test_device_that_is_not_here(tiny_path: Path) -> None:
    assert "is no device" in one_line(tiny_path, device="quantum")
    if not torch.cuda.is_available():
        assert "no CUDA device" in one_line(tiny_path, device="cuda")
    if not torch.backends.mps.is_available():
        assert "no Apple GPU" in one_line(tiny_path, device="mps")
    assert "dtype must be one of" in one_line(tiny_path, dtype="float8")


class CountBytes:
    """Attends as usual, and counts the bytes of the keys and values that come in."""

    def __init__(self) -> None:
        self.bytes = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.bytes += sum(t.numel() * t.element_size() for t in (key, value))
        positions = torch.arange(query.shape[1])
        mask = visible(positions, positions, options.sliding_window)
        return dense_attention(query[None], key[None], value[None], mask, options)[0]


def attended_bytes(module: torch.nn.Module, tokens: int) -> int:
    backend = CountBytes()
    with torch.no_grad(), attention_backend(backend):
        module(torch.arange(tokens).unsqueeze(0), use_cache=False)
    return backend.bytes


def test_kv_bytes(tiny_path: Path) -> None:
    model = load_model(tiny_path, attn_implementation="headrace")
    assert kv_bytes_per_token(model.config, "float32") * 7 == attended_bytes(model.module, 7)
    assert kv_bytes_per_token(model.config, "float64") == 2 * kv_bytes_per_token(model.config, "float32")


@pytest.mark.real
def test_smollm2_knows_its_facts(smollm2_path: Path) -> None:
    """Weights, rotary layout and tokenizer of the converted model fit each other."""
    model = load_model(smollm2_path)
    ids = model.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model.module(ids).logits[0, -1]
    assert model.tokenizer.decode(logits.argmax()) == " Paris"
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert (model.context_length, model.eos_token_ids) == (8192, (2,))
    assert kv_bytes_per_token(read_config(smollm2_path), "float32") == 2 * 30 * 3 * 64 * 4
    assert parameter_count(smollm2_path) == sum(p.numel() for p in model.module.parameters())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_are_not_used(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope
    )
    assert context_length(config) == 64
    assert context_length(transformers.LlamaConfig(max_position_embeddings=256)) == 256
