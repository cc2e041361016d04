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
from headrace.line.history import Attempt, History
from headrace.line.run_folder import TRAJECTORIES, RunFolder
from headrace.types import TrajectoryId


def task_text(task: dict[str, Any] | None) -> str:
    """A task in words: its prompt, or all of it where it has none."""
    if task is None:
        return "(admitted before this journal begins)"
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
    """The kept attempt as text, in order. The policy's tokens are decoded with the run's own tokenizer.

    Without a tokenizer the text is that of `trajectories.jsonl`, and the token ids where that has none.
    """
    assert history.keep is not None
    attempt = history.attempts[history.keep]
    passages = [Passage("task", task_text(history.groups[attempt.id.group].task))]
    if attempt.opening is not None:
        passages += _reply_passages(attempt.opening, turn=False)
    for turn, text in zip(attempt.conversation, _turn_texts(attempt, folder), strict=True):
        end = turn.finish_reason or "not ended yet"
        passages.append(Passage("policy", f"{text}\n({len(turn.ids)} tokens, {end})"))
        if turn.reply is not None:
            passages += _reply_passages(turn.reply, turn=True)
    if attempt.reward is not None and attempt.turns > 1:
        passages.append(Passage("reward", f"{attempt.reward:.6g} in all"))
    elif attempt.error is not None and (not passages or passages[-1].who != "error"):
        passages.append(Passage("error", attempt.error))
    return passages


def _reply_passages(reply: dict[str, Any], turn: bool) -> list[Passage]:
    if reply.get("error") is not None:
        return [Passage("error", reply["error"])]
    passages = [Passage("reward", f"{reply['reward']:.6g}")] if turn else []
    observation = reply.get("observation") or {}
    messages = observation.get("messages") or []
    tools = [tool.get("function", tool).get("name", "?") for tool in observation.get("tools") or []]
    if tools:
        passages.append(Passage("world", f"tools: {', '.join(tools)}"))
    return passages + [Passage("world", message_text(message)) for message in messages]


def _turn_texts(attempt: Attempt, folder: RunFolder) -> list[str]:
    decode = _decoder(folder)
    if decode is not None:
        return [decode(list(turn.ids)) for turn in attempt.conversation]
    recorded = _recorded_completion(folder, attempt.id)
    if recorded is not None and attempt.conversation:
        later = ["(its text is above: the run's tokenizer is not here)"] * (len(attempt.conversation) - 1)
        return [recorded, *later]
    return [f"(the run's tokenizer is not here) {list(turn.ids)}" for turn in attempt.conversation]


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


def _recorded_completion(folder: RunFolder, key: TrajectoryId) -> str | None:
    path = folder.path / TRAJECTORIES
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                data = json.loads(line)
                if (data["group"], data["sample"], data["attempt"]) == key:
                    return str(data["completion"])
            except (ValueError, KeyError):
                continue
    return None
