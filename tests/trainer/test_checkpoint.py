"""Checkpoints: Hugging Face format, whole or not at all, exact on the way back."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packing_cases import ragged_groups, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from headrace.algorithms import load_algorithm
from headrace.config import AlgorithmConfig, TrainerConfig
from headrace.errors import CheckpointError, UserError
from headrace.trainer import Trainer, checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint

LINE = {"consumed": 12, "outstanding": [3, 4], "weights_id": "abc"}


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(61)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def make_trainer(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Trainer:
    module = tiny_llama(seed, dtype, **overrides)
    return Trainer(module, load_algorithm(AlgorithmConfig()), TrainerConfig(learning_rate=1e-3), 10)


def train(trainer: Trainer) -> None:
    trainer.accumulate(ragged_groups(), version=0, max_staleness=0)
    trainer.step()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


def save(path: Path, trainer: Trainer, **overrides: Any) -> None:
    arguments = {"tokenizer": make_tokenizer(), "trainer_state": trainer.state_dict(), "line_state": LINE}
    save_checkpoint(path, trainer.module, **{**arguments, **overrides})


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_trainer_goes_on_bitwise(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    trainer = make_trainer(0, dtype, tie_word_embeddings=tied)
    for _ in range(2):
        train(trainer)
    save(tmp_path / "step-2", trainer)
    resumed = make_trainer(5, dtype, tie_word_embeddings=tied)
    train(resumed)
    assert load_checkpoint(tmp_path / "step-2", resumed.module, resumed) == LINE
    assert resumed.steps == 2
    for either in (trainer, resumed):
        train(either)
    one, two = weights(trainer), weights(resumed)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    trainer = make_trainer(0, dtype, tie_word_embeddings=tied)
    trainer.module.set_attn_implementation("headrace")
    train(trainer)
    save(tmp_path / "step-1", trainer)
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto')\n"
        "tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()\n"
        "print(model.dtype, model.config._attn_implementation, tied)\n"
        "print(len(AutoTokenizer.from_pretrained(sys.argv[1])))\n"
    )
    if dtype == torch.float64 and tied:  # once, in a process that has never heard of headrace
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "step-1")],
            capture_output=True, text=True, check=True, timeout=120, env=environment,
        )  # fmt: skip
        assert found.stdout.split() == ["torch.float64", "sdpa", "True", "61"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1", dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.config._attn_implementation == "sdpa"
    assert "headrace" not in (tmp_path / "step-1" / "config.json").read_text()
    assert loaded.config.tie_word_embeddings == tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    saved = loaded.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights(trainer).items())
    assert AutoTokenizer.from_pretrained(tmp_path / "step-1").chat_template == make_tokenizer().chat_template


def test_a_tokenizer_folder_is_copied_and_a_final_model_has_no_state(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_tokenizer().save_pretrained(source)
    (source / "model.safetensors").write_bytes(b"not ours")
    trainer = make_trainer()
    save_checkpoint(tmp_path / "final", trainer.module, source)
    names = set(content(tmp_path / "final"))
    assert {
        "config.json",
        "model.safetensors",
        "manifest.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    assert not names & {"optimizer.safetensors", "trainer.json", "line.json"}
    assert (tmp_path / "final" / "model.safetensors").stat().st_size > 100
    assert len(AutoTokenizer.from_pretrained(tmp_path / "final")) == 61
    assert load_checkpoint(tmp_path / "final", make_trainer(3).module) == {}
    with pytest.raises(UserError, match="without optimizer state"):
        load_checkpoint(tmp_path / "final", trainer.module, trainer)


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    trainer = make_trainer()
    train(trainer)
    save(tmp_path / "a", trainer)
    save(tmp_path / "b", trainer)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer()
    save(tmp_path / "step-0", trainer)
    load_checkpoint(tmp_path / "step-0", trainer.module, trainer)
    assert capfd.readouterr() == ("", "")


def test_a_parameter_that_was_never_updated_has_no_moments(tmp_path: Path) -> None:
    trainer = make_trainer()
    save(tmp_path / "step-0", trainer)
    load_checkpoint(tmp_path / "step-0", trainer.module, trainer)
    assert trainer.state_dict() == {"steps": 0, "moments": {}}


DAMAGE = {
    "missing": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "bytes": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "not what was written": lambda folder: flip(folder / "model.safetensors"),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "cannot be read": lambda folder: (folder / "manifest.json").write_text("{"),
    "lists no files": lambda folder: (folder / "manifest.json").write_text("{}"),
    "does not say what chat_template.jinja is": lambda folder: replace(
        folder / "manifest.json", '"bytes"', '"bites"'
    ),
    "does not list config.json": lambda folder: (folder / "manifest.json").write_text('{"files": {}}'),
    "holds no object": lambda folder: (folder / "manifest.json").write_text("[]"),
    "no such folder": shutil.rmtree,
}


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path: Path, message: str) -> None:
    trainer = make_trainer()
    train(trainer)
    save(tmp_path / "step-1", trainer)
    DAMAGE[message](tmp_path / "step-1")
    other = make_trainer(4)
    before = weights(other)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(tmp_path / "step-1", other.module, other)
    assert "\n" not in str(caught.value)
    after = weights(other)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert other.steps == 0


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "step-0", make_trainer())
    other = make_trainer(num_hidden_layers=1)
    before = weights(other)
    with pytest.raises(UserError, match="another model"):
        load_checkpoint(tmp_path / "step-0", other.module, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(other).items())


def assert_full_disk_error(folder: Path, trainer: Trainer, reason: str) -> None:
    """Writing step-2 fails with one clear line; step-1 beside it is as it was, and nothing else is left."""
    before = content(folder)
    with pytest.raises(CheckpointError) as caught:
        save(folder / "step-2", trainer)
    intact = f"the checkpoint before it is intact: {folder / 'step-1'}"
    assert str(caught.value) == f"cannot write {folder / 'step-2'}: {reason}; {intact}"
    assert content(folder) == before
    assert [entry.name for entry in folder.iterdir()] == ["step-1"]
    verify_checkpoint(folder / "step-1")


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk needs root")
@pytest.mark.parametrize("room", [1.2, 2.2, 3.9])
def test_a_disk_that_fills_leaves_the_checkpoint_before_intact(tmp_path: Path, room: float) -> None:
    """The second checkpoint runs out of space in its weights, its moments or its last files."""
    trainer = make_trainer(hidden_size=64, intermediate_size=64)
    train(trainer)
    weights_bytes = sum(p.numel() * 4 for p in trainer.module.parameters())
    save(tmp_path / "probe", trainer)
    checkpoint_bytes = sum(-(-f.stat().st_size // 4096) * 4096 for f in (tmp_path / "probe").iterdir())
    room_bytes = checkpoint_bytes + min(int((room - 1) * weights_bytes), checkpoint_bytes - 8192)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room_bytes // 4096 * 4}k", "headrace-test", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this sandbox may not mount")
    try:
        save(disk / "step-1", trainer)
        assert_full_disk_error(disk, trainer, "No space left on device")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_size_limit_stops_a_real_write(tmp_path: Path) -> None:
    """The kernel refuses bytes to this process, wherever it runs; Python ignores the signal."""
    trainer = make_trainer(hidden_size=64, intermediate_size=64)
    train(trainer)
    save(tmp_path / "step-1", trainer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large; the checkpoint before it is intact"):
            save(tmp_path / "step-2", trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    verify_checkpoint(tmp_path / "step-1")


def test_a_disk_that_fills_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    train(trainer)
    save(tmp_path / "step-1", trainer)
    original = checkpoint._write_json

    def full(file: Path, data: dict[str, Any]) -> None:
        if file.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        original(file, data)

    monkeypatch.setattr(checkpoint, "_write_json", full)
    assert_full_disk_error(tmp_path, trainer, "No space left on device")


def test_without_a_checkpoint_before_it_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match="there is no checkpoint before it"):
        save(tmp_path / "checkpoints" / "step-1", make_trainer())


def test_line_state_is_plain_data(tmp_path: Path) -> None:
    save(tmp_path / "step-0", make_trainer())
    assert json.loads((tmp_path / "step-0" / "line.json").read_text()) == LINE
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path / "step-1", make_trainer(), line_state={"x": float("nan")})
    assert not (tmp_path / "step-1").exists()
