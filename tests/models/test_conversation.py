"""What a conversation refuses, where its rows end, and what it does when a template or a policy is odd."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import templates
from templates import DIALECTS, TOOLS
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headrace.errors import ModelError
from headrace.models import Conversation, Extension, LoadedModel
from headrace.models.conversation import GENERATION_PROMPT, HISTORY, TURN, TURN_END

USER = [{"role": "user", "content": "Hi"}]
MORE = [{"role": "user", "content": "More"}]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tiny: LoadedModel) -> PreTrainedTokenizerBase:
    return copy.deepcopy(tiny.tokenizer)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def begin(
    name: str, messages: list[dict[str, Any]] = USER, tools: list[dict[str, Any]] = TOOLS
) -> Conversation:
    return Conversation(templates.tokenizer(name), messages, tools, stop_token_ids=templates.stop_ids(name))


def say(
    conversation: Conversation, name: str, text: str, answers: list[dict[str, Any]]
) -> tuple[Extension, str]:
    """Extend by a turn; and what the extension's ids say."""
    tokenizer = templates.tokenizer(name)
    ids = encode(tokenizer, text)
    extension = conversation.extend(ids, conversation.parse(ids), answers)
    return extension, tokenizer.decode(extension.ids)


# What is refused at once


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        Conversation(tokenizer, USER, [])


def test_a_template_without_a_generation_prompt_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = CHATML.split("{% if")[0]
    with pytest.raises(ModelError, match="no generation prompt"):
        Conversation(tokenizer, USER, [])


def test_a_generation_prompt_within_the_users_turn_will_do(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    )
    conversation = Conversation(tokenizer, USER, [])
    ids = encode(tokenizer, " Yes<|im_end|>")
    assert (
        tokenizer.decode(conversation.extend(ids, conversation.parse(ids), MORE).ids) == "[INST] More [/INST]"
    )


def test_messages_that_are_none_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ModelError, match="at least one"):
        Conversation(tokenizer, [], [])
    for message in (
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        "text",
        {"role": 3},
    ):
        with pytest.raises(ModelError, match="needs a role and a content"):
            Conversation(tokenizer, [message], [])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="surrogate"):
        Conversation(tokenizer, [{"role": "user", "content": "\ud800"}], [])


def test_a_template_that_leaves_out_a_message_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = CHATML.replace("in messages", "in messages if m.role != 'system'")
    with pytest.raises(ModelError, match="leaves out a message of role 'system'"):
        Conversation(tokenizer, [{"role": "system", "content": "Rules"}, *USER], [])
    conversation = Conversation(tokenizer, USER, [])
    ids = encode(tokenizer, "Yes<|im_end|>")
    with pytest.raises(ModelError, match="leaves out a message of role 'system'"):
        conversation.extend(ids, conversation.parse(ids), [{"role": "system", "content": "Rules"}])


def test_tools_that_a_template_leaves_out_are_told(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = CHATML + "{# told once #}"
    with caplog.at_level(logging.WARNING, "headrace.models"):
        for _ in range(2):
            Conversation(tokenizer, USER, TOOLS)
    assert [record.message for record in caplog.records] == [
        "the model's chat template leaves out the tools that the environment offers; describe them in a message"
    ]


# Rows that go on


def test_the_end_of_a_turn_is_sampled_or_appended(tokenizer: PreTrainedTokenizerBase) -> None:
    for sampled, added in (
        ("Yes<|im_end|>", "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"),
        ("Ye", "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"),
        ("<|im_end|>", "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"),
    ):
        conversation = Conversation(tokenizer, USER, [])
        ids = encode(tokenizer, sampled)
        extension = conversation.extend(ids, conversation.parse(ids), MORE)
        assert extension == Extension(encode(tokenizer, added))


def test_a_turn_cut_within_a_character_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation(tokenizer, USER, [])
    ids = encode(tokenizer, "雨雨")[:-1]
    extension = conversation.extend(ids, conversation.parse(ids), MORE)
    assert not extension.split
    row = encode(tokenizer, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") + ids + extension.ids
    assert row[: len(conversation.prompt_ids)] != conversation.prompt_ids
    assert tokenizer.decode(row) == tokenizer.decode(conversation.prompt_ids)


def test_no_answer_begins_another_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation(tokenizer, USER, [])
    ids = encode(tokenizer, "Yes<|im_end|>")
    extension = conversation.extend(ids, conversation.parse(ids), [])
    assert tokenizer.decode(extension.ids) == "\n<|im_start|>assistant\n"


def test_text_after_the_end_of_a_turn_is_no_beginning_of_a_text() -> None:
    """SentencePiece puts a space before a text, which a row would have in its middle."""
    characters = sorted(set("▁\nUA:himore,ysn"))
    fast = Tokenizer(BPE({c: i for i, c in enumerate(characters)}, [], unk_token="n"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'U:' + m.content + '\nA:' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    )
    conversation = Conversation(tokenizer, [{"role": "user", "content": "hi"}], [])
    prompt = conversation.prompt_ids
    ids = encode(tokenizer, "U:hi\nA:yes</s>")[len(prompt) :]
    extension = conversation.extend(ids, conversation.parse(ids), [{"role": "user", "content": "more"}])
    assert prompt + ids + extension.ids == encode(tokenizer, "U:hi\nA:yes</s>U:more\nA:")
    assert encode(tokenizer, "U:more\nA:") != extension.ids


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "qwen2.5",
            '<tool_call>{"name": "weather", "arguments": {"city": "K\\u00f6ln", "days": 1.50}}</tool_call>',
        ),
        ("qwen2.5", '<tool_call>{"arguments": {"city": ""}, "name": "weather"}</tool_call> and\nmore'),
        ("qwen3", '<tool_call>{"name": "weather", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("llama3.1", '{"name": "weather", "parameters": {}};{"name": "look_up", "parameters": {}}'),
        ("llama3.1", '<|python_tag|>{"parameters": {}, "name": "weather"}'),
        (
            "glm4moe",
            "\n<think></think>\n<tool_call>weather <arg_key>days</arg_key><arg_value>1.50</arg_value></tool_call>",
        ),
        ("smollm2", '<tool_call>[{"name": "weather", "arguments": {}}]</tool_call>'),
        ("gemma3", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
    ],
)
def test_a_call_written_in_another_way_than_the_templates_stays_as_it_was(name: str, call: str) -> None:
    conversation = begin(name)
    stop = "<|observation|>" if name == "glm4moe" else DIALECTS[name].stops[0]
    assert conversation.parse(encode(templates.tokenizer(name), call))["tool_calls"]
    extension, added = say(conversation, name, call + stop, [{"role": "tool", "content": "7 °C"}])
    assert not extension.split
    assert "7 °C" in added
    assert "weather" not in added


@pytest.mark.real
def test_answers_of_tools_are_what_the_user_says_where_there_are_no_tools() -> None:
    answers = [{"role": "tool", "content": "7 °C"}, {"role": "tool", "content": "rain"}]
    _, added = say(begin("gemma3"), "gemma3", "Hm<end_of_turn>", answers)
    assert added == "\n<start_of_turn>user\n7 °C\n\nrain<end_of_turn>\n<start_of_turn>model\n"
    # gpt-oss wants a call before a tool's answer.
    _, added = say(begin("gpt-oss"), "gpt-oss", "<|channel|>final<|message|>Hm<|return|>", answers)
    assert added.endswith("Hm<|end|><|start|>user<|message|>7 °C\n\nrain<|end|><|start|>assistant")


# Rows that end


@pytest.mark.real
def test_thinking_that_is_dropped_ends_the_row() -> None:
    call = (
        '<think>\nHm\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>'
    )
    conversation = begin("qwen3")
    extension, _ = say(conversation, "qwen3", call, [{"role": "tool", "content": "7 °C"}])
    assert not extension.split
    restored = Conversation.from_dict(
        templates.tokenizer("qwen3"), conversation.to_dict(), stop_token_ids=templates.stop_ids("qwen3")
    )
    extension, added = say(conversation, "qwen3", "Cold.<|im_end|>", MORE)
    assert (extension.split, extension.reason) == (True, HISTORY)
    assert added.endswith(
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'
        "7 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\nCold.<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<think>" not in added
    assert extension == say(restored, "qwen3", "Cold.<|im_end|>", MORE)[0]
    extension, _ = say(conversation, "qwen3", "<think>\nHm\n</think>\n\nYes<|im_end|>", MORE)
    assert (extension.split, extension.reason) == (True, TURN)
    extension, _ = say(conversation, "qwen3", "Yes<|im_end|>", MORE)
    assert not extension.split


@pytest.mark.real
def test_a_generation_prompt_that_is_dropped_ends_the_row() -> None:
    for name in ("deepseek-r1", "deepseek-v3"):
        conversation = begin(name)
        extension, added = say(conversation, name, "Hm</think>\n\nYes<｜end▁of▁sentence｜>", MORE)
        assert (extension.split, extension.reason) == (True, GENERATION_PROMPT)
        assert added.endswith("Yes<｜end▁of▁sentence｜><｜User｜>More<｜Assistant｜><think>\n")
        assert "Hm" not in added


@pytest.mark.real
def test_a_new_row_keeps_calls_that_a_template_takes_in_one_form_only() -> None:
    call = (
        "Hm</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Köln"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    )
    for name in ("deepseek-r1", "deepseek-v3"):
        extension, added = say(begin(name), name, call, [{"role": "tool", "content": "7 °C"}])
        assert extension.split
        assert 'weather\n```json\n{"city": "Köln"}\n```' in added
        assert added.endswith("<｜tool▁output▁begin｜>7 °C<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")


@pytest.mark.real
def test_another_end_of_turn_ends_the_row() -> None:
    extension, added = say(begin("qwen2.5"), "qwen2.5", "Yes<|endoftext|>", MORE)
    assert (extension.split, extension.reason) == (True, TURN_END)
    assert "<|endoftext|>" not in added
    extension, _ = say(begin("gpt-oss"), "gpt-oss", "<|channel|>final<|message|>Yes<|return|>", MORE)
    assert (extension.split, extension.reason) == (True, TURN_END)
    # GLM-4 ends its turn with the role that it expects to speak.
    extension, _ = say(begin("glm4moe"), "glm4moe", "\n<think></think>\nYes<|observation|>", MORE)
    assert (extension.split, extension.reason) == (True, TURN_END)
    extension, added = say(begin("glm4moe"), "glm4moe", "\n<think></think>\nYes<|user|>", MORE)
    assert (extension.split, added) == (False, "\nMore<|assistant|>")


@pytest.mark.real
def test_calls_in_the_commentary_channel_end_the_row_and_are_kept() -> None:
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
    extension, added = say(begin("gpt-oss"), "gpt-oss", call, [{"role": "tool", "content": "7 °C"}])
    assert (extension.split, extension.reason) == (True, TURN)
    assert added.endswith(
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"7 °C"<|end|><|start|>assistant'
    )


# Odd templates and odd policies


@pytest.mark.real
def test_what_is_refused_changes_nothing() -> None:
    conversation = begin("gemma3")
    before = conversation.to_dict()
    with pytest.raises(ModelError, match="refuses these messages: Conversation roles must alternate"):
        say(conversation, "gemma3", "Yes<end_of_turn>", [{"role": "system", "content": "Rules"}])
    assert conversation.to_dict() == before
    assert not say(conversation, "gemma3", "Yes<end_of_turn>", MORE)[0].split


@pytest.mark.real
def test_a_turn_with_marks_that_a_template_refuses_is_given_without_them() -> None:
    turn = "<|channel|>final<|message|>Yes<|channel|>final<|message|>No<|return|>"
    extension, added = say(begin("gpt-oss"), "gpt-oss", turn, MORE)
    assert (extension.split, extension.reason) == (True, TURN)
    assert "<|start|>assistant<|channel|>final<|message|>finalYesfinalNo<|end|><|start|>user" in added


@pytest.mark.real
def test_the_day_never_changes() -> None:
    for name, day in (("gpt-oss", "Current date: 2024-07-26"), ("llama3.1", "Today Date: 26 Jul 2024")):
        assert day in templates.tokenizer(name).decode(begin(name).prompt_ids)


@pytest.mark.real
@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "gpt-oss"])
def test_a_prompt_is_what_transformers_renders(name: str) -> None:
    messages = [{"role": "system", "content": "Rules"}, *USER, {"role": "assistant", "content": "Yes"}, *MORE]
    tokenizer = templates.tokenizer(name)
    expected = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert begin(name, messages).prompt_ids == expected["input_ids"]


@pytest.mark.real
@pytest.mark.parametrize("name", list(DIALECTS))
def test_no_turn_crashes_a_conversation(name: str) -> None:
    """Random ids, and random orders of a template's own marks."""
    tokenizer = templates.tokenizer(name)
    dialect = DIALECTS[name]
    marks = tokenizer.convert_tokens_to_ids([*dialect.tokens, *dialect.added])
    words = encode(tokenizer, 'analysis final to=functions.weather json {"name": "weather", "arguments": {}}')
    for seed in range(15):
        generator = random.Random(seed)
        conversation = begin(name)
        row = conversation.prompt_ids
        for _ in range(3):
            ids = [
                generator.choice(generator.choice((marks, words, range(len(tokenizer)))))
                for _ in range(generator.randint(1, 12))
            ]
            if generator.random() < 0.3:
                ids[:0] = encode(tokenizer, "<|channel|>final<|message|>")
            answers = [{"role": generator.choice(("user", "tool")), "content": "More"}]
            extension = conversation.extend(ids, conversation.parse(ids), answers)
            row = extension.ids if extension.split else row + ids + extension.ids
            rendered = tokenizer.decode(conversation.prompt_ids)
            assert "".join(tokenizer.decode(row).split()) == "".join(rendered.split())


def test_what_was_given_may_be_changed_afterwards(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = copy.deepcopy(USER)
    conversation = Conversation(tokenizer, messages, [])
    prompt = conversation.prompt_ids
    messages[0]["content"] = "changed"
    conversation.messages[0]["content"] = "changed"
    conversation.to_dict()["messages"][0]["content"] = "changed"
    assert conversation.prompt_ids == prompt
    assert conversation.messages == USER
