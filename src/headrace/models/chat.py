"""Text to token ids and back: prompts, chat messages, completions, streaming.

Invariants
* Token ids that are given are used as they are; nothing is decoded and encoded again.
* A completion's text excludes special tokens.
* What `IncrementalDetokenizer` returns, put together, is `decode_completion` of the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.errors import ModelError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or chat messages with at least `role` and `content`."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Text is encoded as it is, with the special tokens that the tokenizer adds by itself (often a beginning of
    sequence). Messages go through the chat template and end where the assistant's answer begins.

    Raises:
        UserError: the prompt is of no known kind, or has no tokens.
        ModelError: messages were given and the tokenizer has no chat template, or the template refuses them.
    """
    if isinstance(prompt, str):
        check_encodable(prompt)
        ids = tokenizer(prompt)["input_ids"]
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise UserError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}")
    elif all(isinstance(item, Mapping) for item in prompt):
        ids = _encode_messages(tokenizer, prompt) if prompt else []  # type: ignore[arg-type]
    elif all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in prompt):
        ids = list(prompt)
    else:
        raise UserError(
            "a prompt's list holds token ids (integers of at least 0) or chat messages, nothing else"
        )
    if not ids:
        raise UserError("a prompt is empty; it needs at least one token")
    return [int(i) for i in ids]


def encode_task_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a task's prompt: text is one user message, or raw text if there is no chat template.

    Raises:
        As `encode_prompt`.
    """
    if isinstance(prompt, str) and tokenizer.chat_template:
        prompt = [{"role": "user", "content": prompt}]
    return encode_prompt(tokenizer, prompt)


def decode_completion(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text of sampled tokens, without special tokens and without any tidying of spaces."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)  # a list of texts is for a list of lists
    return text


def _encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ModelError(
            "the model's tokenizer has no chat template; give the prompt as text instead of messages"
        )
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(f"a chat message needs a role and a content, not {dict(message)!r}")
        if isinstance(message["content"], str):
            check_encodable(message["content"])
    try:
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )
    # Templates refuse messages with raise_exception, or fail on content they were not written for.
    except (TemplateError, TypeError) as error:
        raise ModelError(f"the model's chat template refuses these messages: {error}") from None
    ids: list[int] = encoded["input_ids"]
    return ids


def check_encodable(text: str, what: str = "a prompt") -> None:
    """Refuse text that no tokenizer takes.

    Raises:
        ModelError: it holds half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{what} holds half a surrogate pair at character {error.start}: {error}") from None


class IncrementalDetokenizer:
    """Turns ids into text one at a time, and never returns half a character.

    It decodes a short window of the last tokens and returns what is new in it. Some tokens that were already
    returned stay in the window, since tokenizers in the style of SentencePiece drop a text's first space.
    `tokenizers.DecodeStream` does not serve: in a run of byte-fallback tokens it returns bytes that later ones make
    invalid, or raises, and while a text does not end in a whole character its work per token grows without bound.
    """

    _WINDOW = 16
    """The window is cut when it has grown this long, which bounds the work per token."""

    _KEPT = 4
    """Tokens kept at a cut. At least one byte each: as long as UTF-8's longest character, so that decoding
    from the cut agrees with decoding from the start about where the last character begins."""

    _BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._skipped = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._window: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty for a special token and within a character."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if self._is_byte(token_id):
            # A run of byte-fallback tokens is text only if all of it is valid, so its end is awaited.
            return ""
        text = self._decode()
        # A final replacement character may be the beginning of a character whose rest follows.
        stable = len(text) - 1 if text.endswith("\ufffd") else len(text)
        new = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if len(self._window) > self._WINDOW:
            held = len(text) - self._emitted
            self._window = self._window[-self._KEPT :]
            self._emitted = len(self._decode()) - held
        return new

    def finish(self) -> str:
        """The text that was held back; afterwards the object starts a new text."""
        rest = self._decode()[self._emitted :]
        self._window, self._emitted = [], 0
        return rest

    def _decode(self) -> str:
        return decode_completion(self._tokenizer, self._window)

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and self._BYTE_TOKEN.fullmatch(token) is not None
