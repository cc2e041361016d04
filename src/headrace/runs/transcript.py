"""One trajectory as text: the task, each turn of the policy, what the world answered, the rewards.

Invariant: nothing is fetched, converted or written for it; without the run's tokenizer it is the recorded text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.runs import events as happened
from headrace.runs.folder import RunFolder
from headrace.runs.history import History
from headrace.runs.state import RunState, Status
from headrace.types import TrajectoryId


def task_text(task: dict[str, Any]) -> str:
    """A task in words: its prompt, or all of it where it has none."""
    prompt = task.get("prompt", task)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return "\n".join(message_text(message) for message in prompt)
    return json.dumps(prompt, ensure_ascii=False)


def message_text(message: dict[str, Any]) -> str:
    """One chat message: its role, what was said, and the tools that were called."""
    parts = [message.get("content") or ""]
    parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    said = "\n".join(
        part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part
    )
    return f"{message.get('role', '?')}: {said}"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a trajectory's text; `who` is "task", "policy", "world", "reward" or "error"."""

    who: str
    text: str


def transcript(history: History, folder: RunFolder) -> list[Passage]:
    """The kept attempt as text, in order.

    A turn that has ended stands in the journal as text. One that has not is decoded with the run's own tokenizer, or
    shown as token ids where that is not here.
    """
    assert history.keep is not None
    attempt = next(one for one in history.of_group(history.keep.group) if one.id == history.keep)
    passages = [Passage("task", task_text(history.groups[attempt.id.group].task))]
    ids: list[int] = []
    finish = "not ended yet"
    turns = 0
    for event in history.kept:
        match event:
            case happened.Rebased():
                assert event.snapshot is not None
                before = RunState.from_dict(event.snapshot).attempt(history.keep)
                said, turns = before.trajectory, before.trajectory.turns
                if before.status is Status.DECODING:
                    ids = said.token_ids[said.turn_start :]
                if turns:
                    size = f"{before.sampled - len(ids)} tokens in {turns} turns, before this journal begins"
                    passages.append(Passage("policy", f"{said.completion}\n({size})"))
            case happened.TokensDrawn():
                drawn, finished = _drawn(event, history.keep)
                ids += drawn
                finish = finished or finish
            case happened.TurnEnded():
                passages.append(Passage("policy", f"{event.text}\n({len(ids)} tokens, {finish})"))
                ids, finish, turns = [], "not ended yet", turns + 1
            case happened.WorldAnswered():
                passages += _reply_passages(event, turn=turns > 0)
    if ids:
        passages.append(Passage("policy", f"{_unfinished(ids, folder)}\n({len(ids)} tokens, {finish})"))
    if attempt.reward is not None and attempt.turns > 1:
        passages.append(Passage("reward", f"{attempt.reward:.6g} in all"))
    elif attempt.error is not None and passages[-1].who != "error":
        passages.append(Passage("error", attempt.error))
    return passages


def _drawn(event: happened.TokensDrawn, key: TrajectoryId) -> tuple[list[int], str | None]:
    """What a Decode unit drew for one attempt, and how its turn ended in it."""
    ids, _ = event.unpack()
    at, found, finish = 0, [], None
    for row in event.rows:
        if row.id == key:
            found, finish = list(ids[at : at + row.drawn]), row.finish
        at += row.drawn
    return found, finish


def _unfinished(ids: list[int], folder: RunFolder) -> str:
    decode = _decoder(folder)
    return f"(the run's tokenizer is not here) {ids}" if decode is None else decode(ids)


def _reply_passages(reply: happened.WorldAnswered, turn: bool) -> list[Passage]:
    if reply.error is not None:
        return [Passage("error", reply.error)]
    passages = [Passage("reward", f"{reply.reward:.6g}")] if turn else []
    observation = reply.observation or {}
    messages = observation.get("messages") or []
    tools = [tool.get("function", tool).get("name", "?") for tool in observation.get("tools") or []]
    if tools:
        passages.append(Passage("world", f"tools: {', '.join(tools)}"))
    return passages + [Passage("world", message_text(message)) for message in messages]


def _decoder(folder: RunFolder) -> Callable[[list[int]], str] | None:
    """The run's own tokenizer as a function from ids to text: of a checkpoint, of the final model or the first one."""
    from headrace.models import cached_models, decode_completion
    from headrace.models.load import load_tokenizer

    places = [folder.final_path, *(folder.checkpoint_path(step) for step in reversed(folder.checkpoints()))]
    first = Path(folder.config.model.name)
    places += [first, *(model.path for model in cached_models() if model.source in (str(first), first.name))]
    for place in places:
        if place.is_dir():
            try:
                tokenizer = load_tokenizer(place)
            except ModelError:
                continue
            return lambda ids: decode_completion(tokenizer, ids)
    return None
