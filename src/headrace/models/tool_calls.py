"""From what a policy wrote in one turn to an assistant message: its thinking, its text and its tool calls.

Invariants
* Any text gives a message and nothing raises: what cannot be read as a call stays content.
* A message is plain JSON data, and its text can be encoded as UTF-8.
* Nothing of the text is dropped but the marks of thinking, calls and channels, and white space around them.

The formats, told apart by their own marks:

* thinking: `<think>…</think>`, where the prompt may have opened it already;
* `<tool_call>…</tool_call>` around a JSON object (Hermes, Qwen), a list of them (SmolLM2) or a name with
  `<arg_key>`/`<arg_value>` pairs (GLM-4);
* DeepSeek's special tokens, with or without a type and a code fence (V3, R1; V3.1);
* OpenAI's harmony channels (gpt-oss);
* bare JSON with `name` and `parameters` (Llama 3), only where tools were offered, since it could be an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_THINK = re.compile(r"\s*<think>")
_END_OF_THINKING = "</think>"

_GLM_NAME = re.compile(r"\s*([\w.:/-]+)\s*")
_GLM_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_FENCE = "\n```json\n"

_HARMONY = re.compile(
    r"(?:<\|start\|>|^)((?:(?!<\|(?:start|message|end|call|return)\|>).)*)<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")

Call = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""


def parse_assistant(
    text: str, *, opened: bool = False, tools: Sequence[Mapping[str, Any]] = (), first_call: int = 0
) -> dict[str, Any]:
    """The assistant message that one turn's text is.

    Args:
        text: the turn with its special tokens, without the one that ended it.
        opened: whether the prompt ended in `<think>`.
        tools: the schemas that were offered.
        first_call: the number of the first call; calls are named `call00000`, `call00001`, … by it.

    Returns:
        `role`, `content` (a string), and where there is any, `reasoning_content` (a string) and `tool_calls`, each
        `{"id", "type": "function", "function": {"name", "arguments": dict}}`.
    """
    if "<|channel|>" in text and "<|message|>" in text:
        reasoning, content, calls = _harmony(text)
    else:
        reasoning, rest = split_thinking(text, opened)
        content, calls = _calls(rest, tools)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call{first_call + index:05d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def split_thinking(text: str, opened: bool = False) -> tuple[str | None, str]:
    """The thinking at the beginning of a turn (None if there is none), and what follows it.

    Thinking that was cut has nothing after it.
    """
    if start := _THINK.match(text):
        text = text[start.end() :]
    elif not opened:
        return None, text
    reasoning, _, rest = text.partition(_END_OF_THINKING)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """The text that is no call, and the calls."""
    if "<tool_call>" in text:
        return _take_out(text, "<tool_call>", "</tool_call>", lambda body: _tagged(body, tools))
    if "<｜tool▁calls▁begin｜>" in text:
        return _take_out(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek)
    if tools and (calls := _bare(text)):
        return "", calls
    return text, []


def _take_out(text: str, begin: str, end: str, read: Callable[[str], list[Call]]) -> tuple[str, list[Call]]:
    """The text without the blocks that `read` understands, and what is in them; untouched if it understands none."""
    calls: list[Call] = []
    kept: list[str] = []
    position = 0
    start = text.find(begin)
    while start >= 0 and (stop := text.find(end, start)) >= 0:
        if found := read(text[start + len(begin) : stop]):
            calls += found
            kept.append(text[position:start])
            position = stop + len(end)
        start = text.find(begin, stop)
    if not calls:
        return text, []
    kept.append(text[position:])
    return "\n".join(part for part in (part.strip() for part in kept) if part), calls


def _tagged(body: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    value = _json(body)
    if value is None:
        return _glm(body, tools)
    values = value if isinstance(value, list) else [value]
    calls = [call for call in map(_call, values) if call is not None]
    return calls if len(calls) == len(values) else []


def _glm(body: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    match = _GLM_NAME.match(body)
    if match is None:
        return []
    name = match[1]
    strings = _string_parameters(name, tools)
    arguments: dict[str, Any] = {}
    position = match.end()
    while position < len(body):
        fields, position = _fields(body, position, _GLM_MARKS)
        if fields is None or fields[1].strip():
            return []
        key, text = fields[0].strip(), fields[2]
        value = None if key in strings else _json(text)
        is_null = key not in strings and text.strip() == "null"
        arguments[key] = text if value is None and not is_null else value
    return [(name, arguments)]


def _string_parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """The parameters of a function that its schema says are strings, which may look like numbers."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping):
                return {
                    key
                    for key, schema in properties.items()
                    if isinstance(schema, Mapping) and schema.get("type") == "string"
                }
    return set()


def _deepseek(body: str) -> list[Call]:
    calls: list[Call] = []
    position = 0
    while position < len(body):
        fields, position = _fields(body, position, _DEEPSEEK_MARKS)
        if fields is None:
            return []
        # "function<sep>name, code fence" (V3, R1), or "name<sep>arguments" (V3.1)
        name, arguments = fields
        if _DEEPSEEK_FENCE in arguments:
            name, _, arguments = arguments.partition(_DEEPSEEK_FENCE)
            arguments = arguments.rstrip().removesuffix("```")
        call = _call({"name": name.strip(), "arguments": _json(arguments)})
        if call is None:
            return []
        calls.append(call)
    return calls


def _fields(text: str, position: int, marks: Sequence[str]) -> tuple[list[str] | None, int]:
    """What stands between marks that follow one another, and where the next text begins.

    The first mark must be the first text at `position`. Nothing is read twice: a policy may repeat marks without
    end, and a pattern that goes back would then take for ever.
    """
    fields: list[str] = []
    for index, mark in enumerate(marks):
        found = text.find(mark, position)
        if found < 0 or (index == 0 and text[position:found].strip()):
            return None, position
        if index:
            fields.append(text[position:found])
        position = found + len(mark)
    rest = len(text) - len(text[position:].lstrip())
    return fields, rest


def _bare(text: str) -> list[Call]:
    """Llama 3: the whole turn is one call, or several with semicolons between them."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if not text.startswith("{"):
        return []
    calls: list[Call] = []
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        call = _call(value) if _plain(value) else None
        if call is None:
            return []
        calls.append(call)
        rest = text[position:].lstrip()
        if rest and not rest.startswith(";"):
            return []
        position = len(text) - len(rest[1:].lstrip())
    return calls


def _harmony(text: str) -> tuple[str | None, str, list[Call]]:
    """Thinking, text and calls of a turn in channels, which begins after `<|start|>assistant`."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[Call] = []
    end = 0
    for match in _HARMONY.finditer(text):
        content.append(text[end : match.start()])
        end = match.end()
        header, body = match[1], match[2]
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        call = _call({"name": recipient[1], "arguments": _json(body)}) if recipient else None
        if call is not None:
            calls.append(call)
        elif channel is not None and channel[1] == "analysis" and recipient is None:
            reasoning.append(body)
        else:
            content.append(body)
    content.append(text[end:])
    return (
        "\n\n".join(reasoning) if reasoning else None,
        "\n\n".join(part for part in content if part.strip()),
        calls,
    )


def _call(value: Any) -> Call | None:
    """A name and arguments out of parsed JSON, if it is a call."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    return name, arguments


def _json(text: str) -> Any:
    """What JSON text says; None if it is none, or not plain data that JSON gives back unchanged."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    # Too deep, or an integer of too many digits, is as unreadable as wrong syntax.
    except (ValueError, RecursionError):
        return None
    return value if _plain(value) else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _plain(value: Any) -> bool:
    """Whether JSON can write the value again: no overflowed float, no half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True
