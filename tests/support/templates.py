"""Real chat templates, and policies that write as the models do for which they were made.

The templates lie in the wheel of trl, which is fetched once into the cache and never becomes part of headrace. All
of them are used with SmolLM2's tokenizer, to which the tokens that a template writes are added.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from headrace.files import cache_folder
from headrace.models import resolve
from headrace.models.load import load_tokenizer

WHEEL = "trl-1.16.0-py3-none-any.whl"
DOWNLOAD_S = 120

Call = tuple[str, dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "look_up")
]


@dataclass(frozen=True)
class Turn:
    """What the policy means to say. `thinking` is None where it writes no thinking block at all."""

    thinking: str | None
    content: str
    calls: tuple[Call, ...] = ()
    answered_by: str = "user"
    """Role of the first message of the answer; GLM-4's policy ends its turn with it."""


@dataclass(frozen=True)
class Dialect:
    """A template and how its model writes.

    Attributes:
        write: a turn and whether the prompt began it with `<think>` -> its text, and the token that ends it.
        thinks: whether the model thinks; `calls`: how many tools it calls in one turn at the most.
    """

    name: str
    file: str | None
    write: Callable[[Turn, bool], tuple[str, str]]
    tokens: tuple[str, ...]
    stops: tuple[str, ...]
    bos: str | None = None
    thinks: bool = False
    calls: int = 2
    added: tuple[str, ...] = field(default=("<think>", "</think>", "<tool_call>", "</tool_call>"))


def _think(turn: Turn, opened: bool, opening: str = "<think>\n", closing: str = "\n</think>\n\n") -> str:
    if turn.thinking is None and not opened:
        return ""
    return ("" if opened else opening) + (turn.thinking or "") + closing


def _hermes_call(call: Call) -> str:
    return f'<tool_call>\n{{"name": "{call[0]}", "arguments": {json.dumps(call[1], ensure_ascii=False)}}}\n</tool_call>'


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _hermes(stop: str) -> Callable[[Turn, bool], tuple[str, str]]:
    def write(turn: Turn, opened: bool) -> tuple[str, str]:
        return _think(turn, opened) + _lines(turn.content, *map(_hermes_call, turn.calls)), stop

    return write


def _smollm2(turn: Turn, opened: bool) -> tuple[str, str]:
    calls = [{"name": name, "arguments": arguments} for name, arguments in turn.calls]
    listed = f"<tool_call>{json.dumps(calls, ensure_ascii=False)}</tool_call>" if calls else ""
    return _lines(turn.content, listed), "<|im_end|>"


def _llama(turn: Turn, opened: bool) -> tuple[str, str]:
    if not turn.calls:
        return turn.content, "<|eot_id|>"
    calls = (
        f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
        for name, arguments in turn.calls
    )
    return "; ".join(calls), "<|eot_id|>"


def _glm(turn: Turn, opened: bool) -> tuple[str, str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n"
            f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    thinking = f"\n<think>{turn.thinking or ''}</think>"
    text = _lines(thinking, turn.content.strip(), *(call(*c) for c in turn.calls))
    return text, "<|user|>" if turn.answered_by == "user" else "<|observation|>"


def _deepseek(turn: Turn, opened: bool) -> tuple[str, str]:
    text = (_think(turn, True, closing="\n</think>\n\n") if opened else "") + turn.content
    if turn.calls:
        calls = (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
            f"```json\n{json.dumps(arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
            for name, arguments in turn.calls
        )
        text += "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"
    return text, "<｜end▁of▁sentence｜>"


def _harmony(turn: Turn, opened: bool) -> tuple[str, str]:
    analysis = (
        ""
        if turn.thinking is None
        else f"<|channel|>analysis<|message|>{turn.thinking}<|end|><|start|>assistant"
    )
    if turn.calls:
        name, arguments = turn.calls[0]
        body = json.dumps(arguments, ensure_ascii=False)
        return f"{analysis} to=functions.{name}<|channel|>commentary json<|message|>{body}", "<|call|>"
    return f"{analysis}<|channel|>final<|message|>{turn.content}", "<|return|>"


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *(
        f"<｜tool▁{what}▁{end}｜>"
        for what in ("calls", "call", "outputs", "output")
        for end in ("begin", "end")
    ),
)
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_ARGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("llama3", "llama3", _llama, _LLAMA, ("<|eot_id|>",), "<|begin_of_text|>", added=()),
        Dialect(
            "llama3.1",
            "llama3_1",
            _llama,
            _LLAMA,
            ("<|eot_id|>", "<|eom_id|>"),
            "<|begin_of_text|>",
            added=(),
        ),
        Dialect("qwen2.5", "qwen2_5", _hermes("<|im_end|>"), _CHATML, ("<|im_end|>", "<|endoftext|>")),
        Dialect("qwen3", "qwen3", _hermes("<|im_end|>"), _CHATML, ("<|im_end|>",), thinks=True),
        Dialect("glm4moe", "glm4moe", _glm, _GLM, ("<|user|>", "<|observation|>"), thinks=True, added=_ARGS),
        Dialect("smollm2", None, _smollm2, _CHATML, ("<|im_end|>",), added=()),
        Dialect(
            "deepseek-v3",
            "deepseekv3",
            _deepseek,
            _DEEPSEEK,
            ("<｜end▁of▁sentence｜>",),
            "<｜begin▁of▁sentence｜>",
            thinks=True,
        ),
        Dialect(
            "deepseek-r1",
            "deepseek_r1_distill",
            _deepseek,
            _DEEPSEEK,
            ("<｜end▁of▁sentence｜>",),
            "<｜begin▁of▁sentence｜>",
            thinks=True,
        ),
        Dialect("gpt-oss", "gptoss", _harmony, _HARMONY, ("<|return|>", "<|call|>"), thinks=True, calls=1),
        Dialect(
            "gemma3",
            "gemma3",
            _hermes("<end_of_turn>"),
            ("<bos>", "<start_of_turn>", "<end_of_turn>"),
            ("<end_of_turn>",),
            "<bos>",
            added=(),
        ),
    )
}


@functools.cache
def _wheel() -> zipfile.ZipFile | str:
    """The wheel, or why there is none."""
    folder = cache_folder() / "test-wheels"
    path = folder / WHEEL
    if not zipfile.is_zipfile(path):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = [*(sys.executable, "-m", "pip", "download"), "trl==1.16.0", "--no-deps"]
            command += ["--only-binary", ":all:", "--disable-pip-version-check", "-q", "-d", temporary]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
                os.replace(Path(temporary, WHEEL), path)
            except subprocess.CalledProcessError as error:
                lines = error.stderr.strip().splitlines()
                return f"the wheel with the chat templates cannot be fetched: {lines[-1] if lines else 'pip failed'}"
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"the wheel with the chat templates cannot be fetched: {error}"
    return zipfile.ZipFile(path)


def template(file: str) -> str:
    """The template of that name in the wheel; skips the test where the wheel cannot be had."""
    wheel = _wheel()
    if isinstance(wheel, str):
        pytest.skip(wheel)
    return wheel.read(f"trl/chat_templates/{file}.jinja").decode()


@functools.cache
def _smollm2_tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve("smollm2-135m"))


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """SmolLM2's tokenizer with a dialect's template and tokens. Shared: do not change it."""
    dialect = DIALECTS[name]
    made = copy.deepcopy(_smollm2_tokenizer())
    if dialect.file is not None:
        made.chat_template = template(dialect.file)
    made.add_tokens(list(dialect.tokens), special_tokens=True)
    made.add_tokens(list(dialect.added))
    if dialect.bos is not None:
        made.bos_token = dialect.bos
    made.eos_token = dialect.stops[0]
    return made


def stop_ids(name: str) -> frozenset[int]:
    return frozenset(tokenizer(name).convert_tokens_to_ids(list(DIALECTS[name].stops)))


@functools.lru_cache(maxsize=100_000)
def _ids(name: str, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(name)(text, add_special_tokens=False)["input_ids"])


@functools.cache
def _marks(name: str) -> re.Pattern[str]:
    dialect = DIALECTS[name]
    return re.compile("(" + "|".join(map(re.escape, dialect.tokens + dialect.added)) + ")")


def sample_ids(name: str, text: str, generator: random.Random) -> list[int]:
    """Ids that say `text`, often not those that the tokenizer would choose."""
    ids: list[int] = []
    for part in _marks(name).split(text):
        start = 0
        while start < len(part):
            whole = part in DIALECTS[name].tokens + DIALECTS[name].added or generator.random() < 0.5
            end = len(part) if whole else start + generator.randint(1, len(part) - start)
            ids += _ids(name, part[start:end])
            start = end
    return ids


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _compiled(name: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda x, indent=None, ensure_ascii=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent
    )
    return environment.from_string(
        tokenizer(name).chat_template,
        {"raise_exception": _raise, "strftime_now": datetime.datetime(2024, 7, 26).strftime},
    )


def render(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """A conversation's text, by jinja2 alone."""
    named = [m | {"thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
    return _compiled(name).render(
        messages=named,
        tools=tools or None,
        add_generation_prompt=True,
        bos_token=DIALECTS[name].bos,
    )
