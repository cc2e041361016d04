"""Prompts become the right ids, and streamed text is the whole text."""

from pathlib import Path

import pytest
import templates
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import DIALECTS
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headrace.errors import ModelError, UserError
from headrace.models import (
    IncrementalDetokenizer,
    LoadedModel,
    decode_completion,
    encode_prompt,
    encode_task_prompt,
)

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="session")
def tokenizer(tiny: LoadedModel) -> PreTrainedTokenizerBase:
    return tiny.tokenizer


@pytest.fixture
def plain(tiny_path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer without a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece() -> PreTrainedTokenizerBase:
    """Llama 2's scheme: spaces are part of tokens, a text's first space is dropped, the rest is bytes."""
    pieces = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "b",
        "▁▁",
        "é",
        "▁<",
        "\n",
    ]
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def test_text_is_raw(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_prompt(tokenizer, "Hi") == [72, 105]


def test_ids_are_taken_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_prompt(tokenizer, (258, 0, 195)) == [258, 0, 195]


def test_messages_end_where_the_answer_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = encode_prompt(tokenizer, HI)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 257


def test_text_of_a_task_is_one_user_message(
    tokenizer: PreTrainedTokenizerBase, plain: PreTrainedTokenizerBase
) -> None:
    assert (
        encode_task_prompt(tokenizer, "Hi")
        == encode_prompt(tokenizer, HI)
        == encode_task_prompt(tokenizer, HI)
    )
    assert encode_task_prompt(plain, "Hi") == [72, 105]
    assert encode_task_prompt(tokenizer, [1, 2]) == [1, 2]


def test_messages_need_a_template(plain: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        encode_prompt(plain, HI)


def test_template_may_refuse(plain: PreTrainedTokenizerBase) -> None:
    plain.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match="roles must alternate"):
        encode_prompt(plain, HI)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        3,
        None,
        b"x",
        [1, "a"],
        [1, -1],
        [True],
        [1.0],
        [{"content": "x"}],
        [{"role": "user"}],
        ["a"],
        {"a": 1},
        "\ud800",
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_other_prompts_are_refused(prompt: object, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError):
        encode_prompt(tokenizer, prompt)


def test_completion_excludes_special_tokens_only(tokenizer: PreTrainedTokenizerBase) -> None:
    assert decode_completion(tokenizer, [*b"It 's  1 .", 258]) == "It 's  1 ."


def streamed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, list[str]]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.push(token_id) for token_id in ids]
    parts.append(detokenizer.finish())
    return "".join(parts), parts


CHARACTERS = st.characters(codec="utf-8") | st.sampled_from("aé你🎉\ufffd \n")


def byte_ids() -> st.SearchStrategy[list[int]]:
    """Ids of tiny-random: valid text, bytes at random, special tokens, in any mixture."""
    valid = st.text(CHARACTERS, max_size=8).map(lambda text: list(text.encode()))
    noise = st.lists(st.integers(0, 258), max_size=8)
    hard = st.lists(st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x80, 0xFF, 0x20, 257]), max_size=30)
    return st.lists(valid | noise | hard, max_size=6).map(lambda parts: [i for part in parts for i in part])


@given(byte_ids())
def test_streamed_bytes_are_the_whole_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    text, _ = streamed(tokenizer, ids)
    assert text == decode_completion(tokenizer, ids)


@given(st.text(CHARACTERS.filter(lambda c: c != "\ufffd"), min_size=1))
def test_each_character_comes_with_its_last_byte(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    _, parts = streamed(tokenizer, list(text.encode()))
    expected = [part for character in text for part in [""] * (len(character.encode()) - 1) + [character]]
    assert parts == [*expected, ""]


@given(
    st.lists(
        st.integers(0, 264) | st.sampled_from([0xE4 + 2, 0xBD + 2, 0xA0 + 2, 258, 259, 260]), max_size=40
    )
)
def test_streamed_sentencepiece_is_the_whole_text(
    sentencepiece: PreTrainedTokenizerBase, ids: list[int]
) -> None:
    text, _ = streamed(sentencepiece, ids)
    assert text == decode_completion(sentencepiece, ids)


class TestDecodeStream:
    """Where the library's detokenizer differs. If one of these fails, it may have become able to replace ours."""

    @staticmethod
    def streamed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str | None]:
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return [stream.step(tokenizer.backend_tokenizer, token_id) for token_id in ids]

    def test_a_byte_is_returned_before_the_run_is_known_to_be_invalid(
        self, sentencepiece: PreTrainedTokenizerBase
    ) -> None:
        ids = sentencepiece.convert_tokens_to_ids(["<0x75>", "<0xE9>"])
        assert self.streamed(sentencepiece, ids) == ["u", None]
        assert decode_completion(sentencepiece, ids) == "\ufffd\ufffd"
        assert streamed(sentencepiece, ids)[0] == "\ufffd\ufffd"

    def test_an_invalid_run_is_an_error(self, sentencepiece: PreTrainedTokenizerBase) -> None:
        ids = sentencepiece.convert_tokens_to_ids(["<0x3A>", "<0xE1>", "<0xFA>", "b"])
        with pytest.raises(Exception, match="Invalid prefix"):
            self.streamed(sentencepiece, ids)
        assert streamed(sentencepiece, ids)[0] == decode_completion(sentencepiece, ids) == "\ufffd" * 3 + "b"

    def test_invalid_bytes_are_all_held_back(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """And decoded again with each token: its work grows with the square of their number."""
        ids = [0xFF] * 200
        assert self.streamed(tokenizer, ids) == [None] * 200
        assert streamed(tokenizer, ids)[1] == ["", *["\ufffd"] * 200]


def test_work_per_token_is_bounded(tokenizer: PreTrainedTokenizerBase) -> None:
    """Also where no character ever ends: invalid bytes without end."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(1000):
        detokenizer.push(0xFF)
        assert len(detokenizer._window) <= 16


def test_detokenizer_starts_again(tokenizer: PreTrainedTokenizerBase) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(0xC3), detokenizer.finish(), detokenizer.push(65), detokenizer.finish()] == [
        "",
        "\ufffd",
        "A",
        "",
    ]


@pytest.mark.real
class TestSmolLM2:
    @pytest.fixture(scope="class")
    def smollm2(self, smollm2_path: Path) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(smollm2_path)

    def test_chat_template(self, smollm2: PreTrainedTokenizerBase) -> None:
        """The template's own system prompt comes first unless one is given."""
        user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        ids = encode_prompt(smollm2, HI)
        assert smollm2.decode(ids) == f"<|im_start|>system\n{system}<|im_end|>\n{user}"
        assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
        ids = encode_prompt(smollm2, [{"role": "system", "content": "Be brief."}, *HI])
        assert smollm2.decode(ids) == f"<|im_start|>system\nBe brief.<|im_end|>\n{user}"

    def test_no_token_is_added_to_raw_text(self, smollm2: PreTrainedTokenizerBase) -> None:
        assert smollm2.convert_ids_to_tokens(encode_prompt(smollm2, "Hello")) == ["Hello"]

    def test_digits_stand_alone(self, smollm2: PreTrainedTokenizerBase) -> None:
        ids = encode_prompt(smollm2, "\n\n12 + 3")
        assert smollm2.convert_ids_to_tokens(ids) == ["ĊĊ", "1", "2", "Ġ+", "Ġ", "3"]

    @settings(max_examples=50)
    @given(text=st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"])))
    def test_text_round_trips(self, smollm2: PreTrainedTokenizerBase, text: str) -> None:
        """SmolLM2's vocabulary lacks some control characters, and planes 4 and above (none in use)."""
        assert smollm2.decode(smollm2(text).input_ids) == text

    @settings(max_examples=50)
    @given(
        ids=st.lists(st.integers(0, 49151), max_size=40),
        text=st.text(CHARACTERS),
    )
    def test_streamed_text_is_the_whole_text(
        self, smollm2: PreTrainedTokenizerBase, ids: list[int], text: str
    ) -> None:
        ids = [*ids, *smollm2(text).input_ids, *ids]
        assert streamed(smollm2, ids)[0] == decode_completion(smollm2, ids)

    @pytest.fixture(scope="class", params=sorted(DIALECTS))
    def dialect(self, request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
        return templates.tokenizer(request.param)

    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_streamed_dialects_are_the_whole_text(
        self, dialect: PreTrainedTokenizerBase, data: st.DataObject
    ) -> None:
        """Special tokens and added ones between characters and within them."""
        marks = st.sampled_from(sorted({*dialect.added_tokens_decoder, *dialect.all_special_ids}))
        words = CHARACTERS.map(lambda text: dialect(text, add_special_tokens=False).input_ids)
        single = (marks | st.integers(0, len(dialect) - 1)).map(lambda token_id: [token_id])
        ids = [i for part in data.draw(st.lists(words | single, max_size=30)) for i in part]
        assert streamed(dialect, ids)[0] == decode_completion(dialect, ids)
