"""The two forms of an environment: `tasks` + `reward`, and a conversation of `reset` and `step`.

Invariant: what user code sees and returns is defined here, and nothing else of headrace is needed to write an
environment. What it returns is checked in `validation.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import asyncio


@runtime_checkable
class Environment(Protocol):
    """Where tasks come from and what a completion of one is worth.

    Either method may be plain or async (`async def tasks` may also be an async generator). Each worker
    process holds one instance and calls one method at a time.
    """

    def tasks(self, split: str) -> Iterable[dict[str, Any]]:
        """The tasks of `"train"` or `"test"`.

        Each is a dict of plain data (text, numbers, booleans, None, lists, dicts with text keys) with at
        least `"prompt"`: a string, or chat messages as a list of `{"role": ..., "content": ...}`. Whatever
        else it holds comes back in `reward`. The tasks must be the same at every call: seed random numbers.

        A sequence (`__len__` and `__getitem__`) is read where it is needed. Anything else is iterated, for
        "train" 10,000 tasks ahead, to find out whether it ends (where making a task is slow, return a
        sequence). What ends is reshuffled each epoch; what does not is served in its own order.
        """
        ...

    def reward(self, task: dict[str, Any], completion: str) -> float:
        """What `completion` is worth as an answer to `task`: a number between -1e12 and 1e12.

        An exception, another type of answer or a timeout is a failed attempt, never a reward of 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees next: chat messages, and in the first observation the tools it may call.

    Args:
        messages: dicts in chat-template form, with the strings "role" and "content" (which may be missing beside
            "tool_calls"), and whatever else the model's template reads, such as "tool_call_id" or "name".
        tools: schemas `{"type": "function", "function": {"name", "description", "parameters"}}`. They belong to
            the whole conversation, so only `reset` gives them.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy.

    Args:
        text: what it wrote, without special tokens and without the stop string that ended it.
        message: the same as an assistant's chat message: "role", "content" and, where the model's format says so,
            "reasoning_content" and "tool_calls".
        finish_reason: "stop" if the policy ended the turn itself, "length" if a limit did.
    """

    text: str
    message: dict[str, Any]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """What the world makes of an action.

    Args:
        observation: what the policy sees next; needed unless `done`.
        reward: what this turn has earned; an episode is worth the sum of its turns.
        done: whether the episode is over.
        info: plain data for the logs.
    """

    observation: Observation | None = None
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class ConversationEnvironment(Protocol):
    """A world that the policy talks to, turn by turn. Every method may be plain or async.

    Each live episode has an instance of its own, built with the same options; many of them live in one worker
    process and share its event loop. Async methods of several episodes run at once; a plain method holds up all of
    them while it runs. A worker may be lost at any time: its episodes then go on in new instances, which are told
    every action again (so the same task and actions must give the same observations and rewards: seed random
    numbers by the task) or get back what `snapshot` last returned.

    Three more methods are optional:

    * `close()` is called once an episode is over, given up or failed, but not when its worker is killed.
    * `snapshot() -> data` returns all that `restore(task, data)` needs to put a new instance, instead of `reset`,
      where this one is: JSON data other than None. It is called after every `reset` and `step`.
    """

    def tasks(self, split: str) -> Iterable[dict[str, Any]]:
        """As in `Environment`, but a task needs no "prompt": it is whatever `reset` makes a conversation of."""
        ...

    def reset(self, task: dict[str, Any]) -> Observation:
        """Begin the episode: what the policy sees first.

        A string stands for one message of the user's, and a list for messages without tools.
        """
        ...

    def step(self, action: Action) -> Step:
        """Answer one turn of the policy, with a Step or a dict with its fields.

        An exception, another type of answer or a timeout is a failed attempt, never a reward of 0.
        """
        ...


def is_conversation(environment: object) -> bool:
    """Whether an environment, or its class, has the conversation form."""
    return all(callable(getattr(environment, method, None)) for method in ("tasks", "reset", "step"))


class Caller:
    """Calls methods that may be async, all on one event loop that lives as long as this object."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """What `method(*args)` returns, awaited if it is awaitable."""
        value = method(*args)
        return self._run(value) if inspect.isawaitable(value) else value

    def iterate(self, source: Iterable[Any] | AsyncIterable[Any]) -> Iterator[Any]:
        """A plain iterator over a plain or async iterable."""
        if isinstance(source, AsyncIterable):
            return self._iterate_async(source)
        return iter(source)

    def _iterate_async(self, source: AsyncIterable[Any]) -> Iterator[Any]:
        end = object()
        iterator = aiter(source)
        while (item := self._run(anext(iterator, end))) is not end:
            yield item

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await awaitable

        if self._runner is None:
            import asyncio  # not at the top: it would slow the start of every worker that needs no loop

            self._runner = asyncio.Runner()
        return self._runner.run(wait())
