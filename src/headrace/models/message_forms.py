"""The same messages in the forms that different chat templates can take.

Templates disagree about whether a call's arguments are data or JSON text, whether a message without text has an empty
content or none, what thinking is called, and which roles there are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import ModelError
from headrace.models.tool_calls import split_thinking


def message_forms(message: dict[str, Any], raw: str, opened: bool) -> Iterator[dict[str, Any]]:
    """An assistant message as templates want it, each in its own way."""
    yield message
    calls = message.get("tool_calls")
    if not calls:
        return
    content, reasoning = message["content"], message.get("reasoning_content")
    as_text = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        }
        for call in calls
    ]
    yield message | {"tool_calls": as_text}
    if not content:
        yield message | {"content": None}
        yield message | {"content": None, "tool_calls": as_text}
    elif reasoning:
        yield message | {"content": "", "reasoning_content": f"{reasoning}\n\n{content}"}
    # The calls as they were written
    unparsed = {key: value for key, value in message.items() if key != "tool_calls"}
    yield unparsed | {"content": split_thinking(raw, opened)[1]}


def plain_forms(raw: str, text: str) -> Iterator[dict[str, Any]]:
    """The whole turn as content, with its special tokens or without."""
    yield {"role": "assistant", "content": raw}
    yield {"role": "assistant", "content": text}


def as_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of tools as what a user says, in one message."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] in ("system", "assistant"):
            merged.append(message)
            continue
        content = message["content"]
        if merged and merged[-1]["role"] == "user" and isinstance(content, str):
            before = merged[-1]["content"]
            if isinstance(before, str):
                merged[-1] = {"role": "user", "content": f"{before}\n\n{content}"}
                continue
        merged.append({"role": "user", "content": content})
    return merged


def with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss calls it thinking."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages, without the fields that are None."""
    copies: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ModelError(f"a chat message needs a role and a content, not {message!r}")
        copied = {key: copy.deepcopy(value) for key, value in message.items() if value is not None}
        if "content" not in copied:
            if not copied.get("tool_calls"):
                raise ModelError(f"a chat message needs a role and a content, not {message!r}")
            copied["content"] = ""
        copies.append(copied)
    return copies
