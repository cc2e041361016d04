"""A GGUF file becomes an equal Hugging Face folder, or one error line."""

import random
from pathlib import Path

import pytest
import torch
from gguf import GGUFValueType

from headrace.errors import ModelError
from headrace.models import LoadedModel, load_model, resolve

PROMPT = "Which is larger, 17 or 71?\n\n  3é"


def cached_folders(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.glob("models/*") if not p.name.startswith(".lock-"))


def test_converted_model_computes_the_same(empty_cache: Path, tiny_gguf: Path, tiny: LoadedModel) -> None:
    path = resolve(tiny_gguf)
    model = load_model(path)
    ids = torch.tensor([tiny.tokenizer(PROMPT).input_ids])
    torch.testing.assert_close(model.module(ids).logits[..., :-1], tiny.module(ids).logits)
    assert model.config.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.eos_token_ids == tiny.eos_token_ids
    assert model.context_length == tiny.context_length


def test_converted_tokenizer_is_the_same(empty_cache: Path, tiny_gguf: Path, tiny: LoadedModel) -> None:
    tokenizer = load_model(resolve(tiny_gguf)).tokenizer
    messages = [{"role": "user", "content": PROMPT}]
    assert len(tokenizer) == len(tiny.tokenizer) + 1
    assert tokenizer.special_tokens_map == tiny.tokenizer.special_tokens_map
    assert tokenizer.chat_template == tiny.tokenizer.chat_template
    rendered = tiny.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer(rendered).input_ids == tiny.tokenizer(rendered).input_ids
    assert tokenizer.decode(tokenizer(rendered).input_ids) == rendered


def test_converted_once(empty_cache: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    first = resolve(tiny_gguf)
    changed = (first / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "same content.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    assert resolve(str(copy)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    assert cached_folders(empty_cache) == [first.name]


def test_smollm_rule_splits_digits_first(empty_cache: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "smollm.gguf"
    file.write_bytes(tiny_gguf.read_bytes().replace(b"gpt-2\0", b"smollm"))
    assert b"smollm" in file.read_bytes()
    split = load_model(resolve(file)).tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a \n\n12")
    assert [piece for piece, _ in split] == ["a", "ĠĊĊ", "1", "2"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "not a GGUF file"),
        (lambda data: b"PK\x03\x04" + data[4:], "not a GGUF file"),
        (lambda data: b"GGUF", "damaged"),
        (lambda data: data[:40], "damaged"),
        (lambda data: data[:5000], "damaged"),
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: data[:-100], "damaged"),
        (lambda data: b"GGUF" + random.Random(0).randbytes(20_000), "damaged"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "damaged"),  # 2^64 - 1 tensors
        (lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.9.attn_q.weight"), "cannot be converted"),
        (lambda data: data.replace(b"general.architecture", b"general.architexture"), "cannot be converted"),
    ],
)
def test_damaged_file_is_one_line(
    damage, message, empty_cache: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(damage(tiny_gguf.read_bytes()))
    with pytest.raises(ModelError, match=message) as caught:
        resolve(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert cached_folders(empty_cache) == []


def test_huge_array_length_does_not_hang(empty_cache: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    key = b"tokenizer.ggml.token_type"
    elements = data.index(key) + len(key) + 4  # after the value's type: the elements' type and their number
    data[elements : elements + 12] = GGUFValueType.UINT8.to_bytes(4, "little") + (1 << 60).to_bytes(
        8, "little"
    )
    file = tmp_path / "huge.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        resolve(file)


def test_part_of_a_split_file_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    part = tmp_path / "model-00001-of-00002.gguf"
    part.write_bytes(tiny_gguf.read_bytes())
    with pytest.raises(ModelError, match="split GGUF"):
        resolve(part)


def test_conversion_is_silent(empty_cache: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(resolve(tiny_gguf))
    assert capfd.readouterr() == ("", "")
