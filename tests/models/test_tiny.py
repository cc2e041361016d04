"""tiny-random: the same bytes every time, a tokenizer that loses nothing, and logits worth testing with."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.models import LoadedModel
from headrace.models.tiny import build_tiny_random


def test_same_bytes_every_time(tiny_path: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    build_tiny_random(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (tiny_path / file.name).read_bytes(), file.name


def test_logits_are_neither_flat_nor_one_hot(tiny: LoadedModel) -> None:
    ids = torch.tensor([tiny.tokenizer("The quick brown fox jumps over the lazy dog.").input_ids])
    with torch.no_grad():
        probabilities = tiny.module(ids).logits[0].softmax(-1)
    best = probabilities.topk(2).values
    assert best[:, 0].max() < 0.7
    assert best[:, 0].min() > 3 / tiny.vocab_size
    assert (best[:, 0] - best[:, 1]).min() > 1e-5
    assert len(set(probabilities.argmax(-1).tolist())) > 10


def test_context_matters(tiny: LoadedModel) -> None:
    with torch.no_grad():
        a, b = (tiny.module(torch.tensor([[first, 66, 67]])).logits[0, -1].softmax(-1) for first in (65, 97))
    assert (a - b).abs().sum() > 0.1


@given(st.text())
def test_text_round_trips_byte_by_byte(tiny: LoadedModel, text: str) -> None:
    ids = tiny.tokenizer(text).input_ids
    if not any(token in text for token in ("<|pad|>", "<|im_start|>", "<|im_end|>")):
        assert bytes(ids) == text.encode()
    assert tiny.tokenizer.decode(ids) == text


def test_chat_template_is_chatml(tiny: LoadedModel) -> None:
    rendered = tiny.tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tiny.tokenizer(rendered).input_ids.count(257) == 3
    assert tiny.eos_token_ids == (258,)
