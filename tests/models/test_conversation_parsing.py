"""Whatever a policy writes becomes a message, and calls in each model's form are found."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.models.tool_calls import parse_assistant, split_thinking

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"zip": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]

MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *(
        "</arg_value>",
        "<|python_tag|>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "analysis",
    ),
    *(
        " to=functions.f",
        "commentary",
        "final",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n```json\n",
        "\n```",
        "function",
        "assistant",
        "\n",
        " ",
        "f",
    ),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {"a": 1e999}}',
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
    ),
    *(
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": 1}',
        '{"name": "f", "arguments": NaN}',
        "null",
    ),
]


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]


@given(
    st.one_of(
        st.text(), st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=4)), max_size=30).map("".join)
    ),
    st.booleans(),
    st.sampled_from(
        [[], TOOLS, [{}], [{"function": 3}], [{"name": "f", "parameters": {"properties": {"a": 1}}}]]
    ),
)
@settings(max_examples=600, deadline=None)
@example("<tool_call>" + "[" * 100_000 + "</tool_call>", False, [])
@example('{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}", False, TOOLS)
def test_any_text_gives_a_plain_message(text: str, opened: bool, tools: list[Any]) -> None:
    message = parse_assistant(text, opened=opened, tools=tools)
    assert message["role"] == "assistant"
    assert isinstance(message["content"], str)
    assert isinstance(message.get("reasoning_content", ""), str)
    json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    for name, arguments in called(message):
        assert isinstance(name, str)
        assert name
        assert isinstance(arguments, dict)
    if not called(message) and "reasoning_content" not in message and "<|channel|>" not in text:
        assert message["content"] == text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "", [("f", {"a": "é"})]),
        (
            'Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", '
            '"arguments": {"b": [1]}}</tool_call>',
            "Let me see.",
            [("f", {}), ("g", {"b": [1]})],
        ),
        (
            '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        (
            "\n<tool_call>weather\n<arg_key>zip</arg_key>\n<arg_value>01234</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>x</arg_key>\n<arg_value>a b</arg_value>\n"
            "<arg_key>n</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
            "",
            [("weather", {"zip": "01234", "days": 3, "x": "a b", "n": None})],
        ),
        ("<tool_call>now\n</tool_call>", "", [("now", {})]),
        (
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "Hm.",
            [("f", {"a": 1}), ("g", {})],
        ),
        (
            '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
            "",
            [("f", {"a": 1})],
        ),
    ],
)
def test_calls_of_each_form(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    message = parse_assistant(text, tools=TOOLS)
    assert called(message) == calls
    assert message["content"] == content


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>[{"name": "f", "arguments": {}}, 3]</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        "<tool_call>f <arg_key>a</arg_key></tool_call>",
        "<tool_call>f <arg_key>a</arg_key>b<arg_value>c</arg_value></tool_call>",
        "<tool_call>two words</tool_call>",
        '{"name": "f", "parameters": {}} and more',
        '{"name": "f", "parameters": 3}',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>x<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
)
def test_a_malformed_call_stays_content(text: str) -> None:
    message = parse_assistant(text, tools=TOOLS)
    assert message == {"role": "assistant", "content": text}


def test_bare_json_is_an_answer_where_no_tools_were_offered() -> None:
    text = '{"name": "f", "parameters": {}}'
    assert parse_assistant(text) == {"role": "assistant", "content": text}


def test_a_malformed_call_beside_a_good_one_stays_content() -> None:
    message = parse_assistant(
        '<tool_call>{"name"</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    assert called(message) == [("f", {})]
    assert message["content"] == '<tool_call>{"name"</tool_call>'


def test_thinking() -> None:
    assert split_thinking("<think>\na\n</think>\n\nb") == ("a", "b")
    assert split_thinking("a\n</think>\n\nb", opened=True) == ("a", "b")
    assert split_thinking("<think>\ncut") == ("cut", "")
    assert split_thinking("cut", opened=True) == ("cut", "")
    assert split_thinking("<think></think>b") == ("", "b")
    assert split_thinking("the tag </think> ends it") == (None, "the tag </think> ends it")


def test_harmony() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert parse_assistant(thought + "<|channel|>final<|message|>Yes.") == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
    }
    for header in (
        " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
    ):
        message = parse_assistant(f'{thought}{header}<|message|>{{"a": 1}}')
        assert called(message) == [("f", {"a": 1})]
        assert message["content"] == ""
        assert message["reasoning_content"] == "Hm."
        bad = parse_assistant(f"{thought}{header}<|message|>{{a")
        assert not called(bad)
        assert bad["content"] == "{a"
    assert parse_assistant("<|channel|>analysis<|message|>cut")["reasoning_content"] == "cut"


def test_calls_are_numbered_through_the_conversation() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert [call["id"] for call in parse_assistant(text, first_call=9)["tool_calls"]] == [
        "call00009",
        "call00010",
    ]


@pytest.mark.parametrize(
    "mark", [*MARKS, "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value>", "<think> "]
)
def test_endless_repetition_is_read_in_one_go(mark: str) -> None:
    """A policy that repeats itself must not stall the line."""
    begun = time.process_time()
    for before in ("", "<tool_call>f", "<｜tool▁calls▁begin｜>", "<|channel|><|message|>", "{"):
        parse_assistant(before + mark * (100_000 // len(mark)) + "</tool_call>", tools=TOOLS)
    assert time.process_time() - begun < 2
