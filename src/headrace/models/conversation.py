"""A conversation as rows of token ids: token in, token out over turns.

Invariants
* What the policy sampled is never decoded and encoded again. A row is its first prompt, and then after each turn's
  sampled ids the ids of what was newly rendered.
* A row is what a fresh rendering of the conversation says, up to white space within the policy's own turns.
* Where the chat template renders what was said before differently (drops old thinking, ends a turn with another
  token, rewrites a call), the row ends, and the whole new rendering is the prompt of another one.
* Everything is a function of messages, tools and ids alone. Templates that write today's date get `TODAY`.
* A conversation that was refused something is as it was before.
"""

from __future__ import annotations

import copy
import datetime
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import ModelError
from headrace.models.chat import check_encodable, decode_completion
from headrace.models.folder import first_line
from headrace.models.message_forms import as_users, checked, message_forms, plain_forms, with_thinking
from headrace.models.tool_calls import parse_assistant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("headrace.models")

TODAY = datetime.datetime(2024, 7, 26)
"""The day that templates are told: Llama 3.1's default. With the clock's day a run could not be repeated."""

HISTORY = "the chat template rewrites earlier turns"
GENERATION_PROMPT = "the chat template drops what the generation prompt began the turn with"
TURN = "the chat template renders the policy's turn differently"
TURN_END = "the chat template ends the policy's turn with another token"
"""Why rows end: `Extension.reason`."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What follows the sampled ids of a turn.

    Attributes:
        ids: token ids that the policy did not sample: those to append to the row, or of a new row's prompt.
        split: whether they are a new row's prompt.
        reason: why the row ended, one of this module's constants; empty if it goes on.
    """

    ids: list[int]
    split: bool = False
    reason: str = ""


class Conversation:
    """Messages, and the ids that a policy sees of them.

    Args:
        messages: in chat-template form: `role`, `content`, and what else the template knows.
        tools: JSON schemas of functions.
        stop_token_ids: the ids that end a turn (`LoadedModel.eos_token_ids`); the tokenizer's own by default.

    Raises:
        ModelError: there is no chat template, it has no generation prompt, or it refuses or leaves out a message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        self._prepare(tokenizer, tools, stop_token_ids)
        self._messages = checked(messages)
        if not self._messages:
            raise ModelError("a conversation has no messages; it needs at least one")
        self._rendered = self._open()

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the whole conversation as it is rendered now, up to where the policy's turn begins."""
        return self._encode(self._rendered)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, as the chat template is given them."""
        return copy.deepcopy(self._messages)

    def parse(self, sampled_ids: Sequence[int], text: str = "") -> dict[str, Any]:
        """The assistant message that a turn is (see `parse_assistant`).

        Args:
            sampled_ids: the turn, with the id that ended it.
            text: the completion as environments read it. The message is made from the ids alone: channels and
                calls are marked by special tokens, which the text lacks.
        """
        raw, _ = self._turn(sampled_ids)
        calls = sum(len(message.get("tool_calls") or ()) for message in self._messages)
        return parse_assistant(raw, opened=self._opened(), tools=self._tools, first_call=calls)

    def extend(
        self,
        sampled_ids: Sequence[int],
        message: Mapping[str, Any],
        new_messages: Sequence[Mapping[str, Any]],
    ) -> Extension:
        """End the policy's turn and begin its next one.

        Args:
            sampled_ids: the turn, with the id that ended it, if one did.
            message: what `parse` made of it.
            new_messages: what the world answered.

        Raises:
            ModelError: the chat template refuses or leaves out a message.
        """
        raw, stop = self._turn(sampled_ids)
        said = checked([message])[0]
        answers = checked(new_messages)
        text = decode_completion(self._tokenizer, sampled_ids)
        refusal: ModelError | None = None
        # A template may refuse roles, or a message that holds marks of its own: then it is given plainer ones.
        for new in (answers, as_users(answers)):
            for forms in (message_forms(said, raw, self._opened()), plain_forms(raw, text)):
                splits: list[tuple[list[dict[str, Any]], str, str]] = []
                for form in forms:
                    messages = [*self._messages, form, *new]
                    try:
                        rendered = self._render_all(messages, len(self._messages) + 1)
                    except ModelError as error:
                        refusal = refusal or error
                        continue
                    added, reason = self._compare(raw, stop, rendered)
                    if added is not None:
                        ids = self._encode(added, after=None if stop is None else sampled_ids[-1])
                        self._messages, self._rendered = messages, rendered
                        return Extension(ids)
                    splits.append((messages, rendered, reason))
                if splits:
                    return self._split(splits)
        assert refusal is not None
        raise refusal

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, from which `from_dict` makes a conversation that goes on with the same ids."""
        return {"messages": self.messages, "tools": copy.deepcopy(self._tools)}

    @classmethod
    def from_dict(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: Mapping[str, Any],
        *,
        stop_token_ids: Iterable[int] = (),
    ) -> Self:
        """
        Raises:
            ModelError: as the class does; the template is not the one that the conversation was begun with.
        """
        self = cls.__new__(cls)
        self._prepare(tokenizer, data["tools"], stop_token_ids)
        self._messages = copy.deepcopy(list(data["messages"]))
        self._rendered = self._render(self._messages)
        return self

    # Rendering

    def _prepare(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], stops: Iterable[int]
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the model's tokenizer has no chat template, which a conversation needs; add one"
            )
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._stop_token_ids = frozenset(stops) or frozenset(own)
        self._tools = copy.deepcopy([dict(tool) for tool in tools])

    def _open(self) -> str:
        """The first rendering, after a look at whether the template can carry a conversation."""
        rendered = self._render_all(self._messages, 0)
        if rendered == self._render(self._messages, generation_prompt=False):
            self._check_generation_prompt()
        if self._tools and rendered == self._render(self._messages, tools=False):
            _warn_of_tools(str(self._tokenizer.chat_template))
        return rendered

    def _check_generation_prompt(self) -> None:
        """Refuse a template unless what it renders ends where the policy's turn begins."""
        probe = [{"role": "user", "content": "a"}]
        rendered = self._render(probe)
        if rendered == self._render(probe, generation_prompt=False):
            answered = self._render([*probe, {"role": "assistant", "content": "b"}], generation_prompt=False)
            # Some have no prompt of their own since the user's turn ends with it.
            if not (answered.startswith(rendered) and answered[len(rendered) :].lstrip().startswith("b")):
                raise ModelError(
                    "the model's chat template has no generation prompt; "
                    "add one under {% if add_generation_prompt %}"
                )

    def _render_all(self, messages: list[dict[str, Any]], first: int) -> str:
        """Render, and refuse a template that leaves out one of the messages from the number `first` on."""
        rendered = self._render(messages)
        tail = rendered[len(self._rendered) :] if first and rendered.startswith(self._rendered) else ""
        for index in range(first, len(messages)):
            content = messages[index].get("content")
            if messages[index]["role"] == "user" or not content:
                continue
            if isinstance(content, str) and content.strip() in tail:
                continue
            try:
                without = self._render(messages[:index] + messages[index + 1 :])
            except ModelError:
                continue
            if without == rendered:
                role = messages[index]["role"]
                raise ModelError(
                    f"the model's chat template leaves out a message of role {role!r}; use another role"
                )
        return rendered

    def _render(
        self, messages: list[dict[str, Any]], *, generation_prompt: bool = True, tools: bool = True
    ) -> str:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        schemas = self._tools if tools and self._tools else None
        # As `apply_chat_template` does, which neither lets one set the day nor passes on a content of None.
        try:
            template = _compile_jinja_template(self._tokenizer.get_chat_template(None, schemas))
            rendered: str = template.render(
                **self._tokenizer.special_tokens_map,
                messages=[with_thinking(message) for message in messages],
                tools=schemas,
                documents=None,
                add_generation_prompt=generation_prompt,
                strftime_now=TODAY.strftime,
            )
        # A template is a program and can fail with anything.
        except Exception as error:
            raise ModelError(
                f"the model's chat template refuses these messages: {first_line(error)}"
            ) from None
        check_encodable(rendered, "a message")
        return rendered

    # Comparing a rendering with the row

    def _compare(self, raw: str, stop: str | None, rendered: str) -> tuple[str | None, str]:
        """What a rendering adds to the row after its sampled ids, or None and why it does not continue the row."""
        before = self._rendered
        if not rendered.startswith(before.rstrip()):
            opened = self._render(self._messages, generation_prompt=False)
            return None, GENERATION_PROMPT if rendered.startswith(opened.rstrip()) else HISTORY
        end = _match(rendered, len(before), raw) if rendered.startswith(before) else None
        if end is None:
            end = _match_loosely(rendered, len(before.rstrip()), raw)
        if end is None:
            return None, TURN
        if stop is None:
            return rendered[end:], ""
        if not rendered.startswith(stop, end):
            end += len(rendered[end:]) - len(rendered[end:].lstrip())
        return (rendered[end + len(stop) :], "") if rendered.startswith(stop, end) else (None, TURN_END)

    def _split(self, splits: list[tuple[list[dict[str, Any]], str, str]]) -> Extension:
        """Begin a new row with the first rendering that keeps all of the policy's message."""
        kept = (split for split in splits if self._keeps(split[0], split[1]))
        messages, rendered, reason = next(kept, splits[0])
        ids = self._encode(rendered)
        self._messages, self._rendered = messages, rendered
        return Extension(ids, True, reason)

    def _keeps(self, messages: list[dict[str, Any]], rendered: str) -> bool:
        """Whether content and every call of the policy's last message make a difference to the rendering."""
        index = len(self._messages)
        message = messages[index]
        calls = message.get("tool_calls") or []
        poorer = [message | {"tool_calls": [*calls[:i], *calls[i + 1 :]]} for i in range(len(calls))]
        if message.get("content"):
            poorer.append(message | {"content": ""})
        for other in poorer:
            try:
                if self._render([*messages[:index], other, *messages[index + 1 :]]) == rendered:
                    return False
            except ModelError:
                continue
        return True

    # Ids

    def _turn(self, sampled_ids: Sequence[int]) -> tuple[str, str | None]:
        """A turn's text with special tokens, and the text of the token that ended it, if one did."""
        ids = list(sampled_ids)
        stop = self._decode([ids.pop()]) if ids and ids[-1] in self._stop_token_ids else None
        return self._decode(ids), stop

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, after: int | None = None) -> list[int]:
        """Ids of rendered text; `after` is the special token that stands before it."""
        if not text:
            return []
        if after is not None:
            # Some tokenizers treat a text's beginning in their own way; here it is no beginning.
            ids = self._tokenizer(self._decode([after]) + text, add_special_tokens=False)["input_ids"]
            if ids and ids[0] == after:
                return list(ids[1:])
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _opened(self) -> bool:
        return self._rendered.rstrip().endswith("<think>")


def _match(text: str, start: int, turn: str) -> int | None:
    """Where `turn` ends in `text`, if it stands at `start`."""
    return start + len(turn) if text.startswith(turn, start) else None


def _match_loosely(text: str, start: int, turn: str) -> int | None:
    """As `_match`, whatever white space either of them has."""
    for character in turn:
        if character.isspace():
            continue
        while start < len(text) and text[start].isspace():
            start += 1
        if start == len(text) or text[start] != character:
            return None
        start += 1
    return start


@functools.cache
def _warn_of_tools(template: str) -> None:
    """Once for each template."""
    logger.warning(
        "the model's chat template leaves out the tools that the environment offers; describe them in a message"
    )
