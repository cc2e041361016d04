"""A thousand conversations under real chat templates: what the engine saw is what is trained."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import templates
from templates import DIALECTS, TOOLS, Turn

from headrace.models import Conversation
from headrace.types import Trajectory, TrajectoryId

pytestmark = pytest.mark.real

CONVERSATIONS = 100
"""For each of ten templates."""

WORDS = 'the rain in Málaga 雨 is 12.5 °C, «quoted» “and” 👩‍🚀 so\tmaybe { } \\n ok é <b> naïve 漢字 ... "x" '.split(
    " "
)
NEVER = {"llama3", "llama3.1", "qwen2.5", "smollm2", "gemma3"}


@dataclass
class Engine:
    """Records each prompt that it is given and what it answered."""

    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def generate(self, prompt: list[int], ids: list[int]) -> list[int]:
        self.seen.append((list(prompt), list(ids)))
        return ids


def text(generator: random.Random, least: int = 0) -> str:
    words = generator.choices(WORDS, k=generator.randint(least, 8))
    glue = generator.choice((" ", " ", "\n", "  "))
    # Templates may trim what the policy wrote.
    return glue.join(words) + generator.choice(("", "", "", " ", "\n", "."))


def calls(generator: random.Random, most: int) -> tuple[templates.Call, ...]:
    values: list[Any] = ["Köln", 'a "b" \\ c', "12", 3, -1.5, True, None, [1, "二"], {"k": ["v"]}, ""]
    return tuple(
        (
            generator.choice(("weather", "look_up")),
            {key: generator.choice(values) for key in ("city", "days", "größe")[: generator.randint(0, 3)]},
        )
        for _ in range(generator.randint(1, most))
    )


def answer(generator: random.Random, turn: Turn, name: str) -> list[dict[str, Any]]:
    if turn.answered_by == "tool":
        messages = [
            {"role": "tool", "name": call[0], "tool_call_id": "call00000", "content": text(generator, 1)}
            for call in turn.calls[:1] * generator.randint(1, 3)
        ]
        # Gemma has no tools: there the answers become what the user says.
        if name != "gemma3" and generator.random() < 0.15:
            messages.append({"role": "user", "content": text(generator, 1)})
        return messages
    return [{"role": "user", "content": text(generator, 1)}]


def turn(generator: random.Random, name: str) -> Turn:
    dialect = DIALECTS[name]
    thinking = text(generator, 1).strip() if dialect.thinks and generator.random() < 0.6 else None
    if thinking is not None and name != "gpt-oss" and generator.random() < 0.2:
        thinking = ""
    wanted = calls(generator, dialect.calls) if generator.random() < 0.5 else ()
    # Llama 3 and gpt-oss say nothing beside a call.
    quiet = wanted and (name.startswith("llama") or name == "gpt-oss" or generator.random() < 0.5)
    by = "tool" if wanted and generator.random() < 0.8 else "user"
    return Turn(thinking, "" if quiet else text(generator), wanted, by)


def squeezed(rendered: str) -> str:
    return re.sub(r"\s+", "", rendered)


class Oracle:
    """Says of each whole turn, from what is known about a template, whether the next rendering rewrites the row."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thinking_in_row = False
        """Whether the row holds thinking that the template shows until the user speaks again."""

    def splits(self, turn: Turn, opened: bool, roles: list[str]) -> bool:
        name = self.name
        if name in NEVER:
            return False
        if name.startswith("deepseek"):
            return opened
        if name == "gpt-oss":
            return not turn.calls or turn.thinking == ""
        split = False
        if "user" in roles:
            written = turn.thinking is not None if name == "qwen3" else bool(turn.thinking)
            split = written or self.thinking_in_row
            self.thinking_in_row = False
        elif turn.thinking == "" and name == "qwen3":
            split = True
        else:
            self.thinking_in_row |= bool(turn.thinking)
        return split


@pytest.mark.parametrize("name", list(DIALECTS))
def test_rows_equal_what_the_engine_saw(name: str) -> None:
    splits = appended = cut_turns = 0
    for seed in range(CONVERSATIONS):
        generator = random.Random(f"{name} {seed}")
        cuts = generator.random() < 0.3
        done = _converse(name, generator, cuts)
        splits += done[0]
        appended += done[1]
        cut_turns += done[2]
    assert appended > 20
    assert cut_turns > 10
    assert (splits == 0) == (name in NEVER)


def _converse(name: str, generator: random.Random, cuts: bool) -> tuple[int, int, int]:
    tokenizer, stops = templates.tokenizer(name), templates.stop_ids(name)
    tools = TOOLS if name not in ("llama3", "smollm2", "gemma3") and generator.random() < 0.6 else []
    if name == "llama3.1" and not tools:
        tools = TOOLS[:1]
    opening = [{"role": "system", "content": text(generator, 1)}] if generator.random() < 0.5 else []
    opening.append({"role": "user", "content": text(generator, 1)})
    conversation = Conversation(tokenizer, opening, tools, stop_token_ids=stops)
    fresh = templates.render(name, opening, tools)
    assert tokenizer.decode(conversation.prompt_ids) == fresh

    engine, oracle = Engine(), Oracle(name)
    trajectory = Trajectory(TrajectoryId(0, 0, 0), 1.0)
    trajectory.append_observed(conversation.prompt_ids)
    numbers = [0, 0, 0]
    turns = generator.randint(2, 5)
    for number in range(turns):
        opened = fresh.rstrip().endswith("<think>")
        said = turn(generator, name)
        written, stop = DIALECTS[name].write(said, opened)
        ids = templates.sample_ids(name, written, generator)
        cut = cuts and generator.random() < 0.5 and len(ids) > 0
        if cut:
            ids = ids[: generator.randint(1, len(ids))]
            numbers[2] += 1
        else:
            ids += [tokenizer.convert_tokens_to_ids(stop)]
        start = len(trajectory.token_ids)
        for token_id in engine.generate(trajectory.token_ids, ids):
            trajectory.append_sampled(token_id, -1.0, 0)
        if number == turns - 1:
            break

        message = conversation.parse(ids, tokenizer.decode(ids, skip_special_tokens=True))
        assert json.loads(json.dumps(message)) == message
        if not cut and not (tools and name == "gpt-oss"):
            _assert_parsed(message, said, name)
        replies = answer(generator, said, name)
        if generator.random() < 0.2:
            restored = Conversation.from_dict(
                tokenizer, json.loads(json.dumps(conversation.to_dict())), stop_token_ids=stops
            )
            twin = Conversation.from_dict(tokenizer, conversation.to_dict(), stop_token_ids=stops)
            assert restored.extend(ids, message, replies) == twin.extend(ids, message, replies)
            conversation, untouched = restored, conversation
            extension = untouched.extend(ids, message, replies)
            assert restored.prompt_ids == untouched.prompt_ids
        else:
            extension = conversation.extend(ids, message, replies)

        row = tokenizer.decode(trajectory.token_ids)
        fresh = templates.render(name, conversation.messages, tools)
        if extension.split:
            assert extension.reason
            assert tokenizer.decode(extension.ids) == fresh
            assert not squeezed(fresh).startswith(squeezed(row))
            trajectory.split(extension.ids, extension.reason)
        else:
            assert not extension.reason
            trajectory.append_observed(extension.ids)
            assert squeezed(tokenizer.decode(trajectory.token_ids)) == squeezed(fresh)
            assert trajectory.token_ids[start : start + len(ids)] == ids
        numbers[0 if extension.split else 1] += 1
        if cut:
            # From here on the oracle, which knows whole turns only, is silent.
            oracle.name = "" if oracle.name not in NEVER else oracle.name
        if oracle.name:
            roles = [reply["role"] for reply in replies]
            assert extension.split == oracle.splits(said, opened, roles), (said, roles, extension.reason)

    _assert_rows(trajectory, engine)
    return numbers[0], numbers[1], numbers[2]


def _assert_rows(trajectory: Trajectory, engine: Engine) -> None:
    """The rows are the prompts that the engine was given and what it answered, and nothing else is trained."""
    seen = list(engine.seen)
    for row in trajectory.rows:
        sampled: list[int] = []
        end = 0
        while seen and row.token_ids[: len(seen[0][0])] == seen[0][0] and len(seen[0][0]) >= end:
            prompt, ids = seen.pop(0)
            assert row.token_ids[len(prompt) : len(prompt) + len(ids)] == ids
            sampled += range(len(prompt), len(prompt) + len(ids))
            end = len(prompt) + len(ids)
        assert sampled
        assert end == len(row.token_ids)
        assert [i for i, was in enumerate(row.sampled) if was] == sampled
    assert not seen


def _assert_parsed(message: dict[str, Any], said: Turn, name: str) -> None:
    found = tuple(
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    )
    if name == "llama3":
        # No tools were offered, so JSON is an answer.
        assert not found
        return
    if name == "glm4moe":
        # Its values are written without types; without a schema they are read as JSON.
        assert [call[0] for call in found] == [call[0] for call in said.calls]
    else:
        assert found == said.calls
    if said.calls:
        assert message["content"].strip() == said.content.strip()
    if said.thinking and "reasoning_content" in message:
        assert message["reasoning_content"].strip() == said.thinking.strip()
