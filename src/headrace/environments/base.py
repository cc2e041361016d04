"""The `tasks` + `reward` form of an environment, and what its answers must look like.

Invariants
* A validated task holds only what JSON gives back unchanged, so that a task out of a checkpoint equals the
  one that was served.
* A validated reward is a finite float.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headrace.errors import EnvironmentSetupError

if TYPE_CHECKING:
    import asyncio

_SHOWN_CHARS = 60

MAX_INTEGER_BITS = 10_000
"""Larger integers cannot be written as decimal text, which Python limits to 4,300 digits."""


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
        """What `completion` is worth as an answer to `task`: any finite number.

        An exception, another type of answer or a timeout is a failed attempt, never a reward of 0.
        """
        ...


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


def validate_task(task: object, source: str = "tasks") -> dict[str, Any]:
    """A copy of `task` as plain data, NumPy scalars converted to numbers.

    Args:
        task: what an environment yielded.
        source: the call it came from, for the error's text.

    Raises:
        EnvironmentSetupError: it is no dict, has no usable prompt, or holds something that JSON would not
            give back unchanged.
    """
    if not isinstance(task, dict):
        raise EnvironmentSetupError(f"{source} yielded {_show(task)}; yield a dict with at least 'prompt'")
    if "prompt" not in task:
        keys = ", ".join(repr(key) for key in task) or "none"
        raise EnvironmentSetupError(f"{source} yielded a task without 'prompt' (its keys: {keys})")
    plain: dict[str, Any] = _plain(task, "task", source)
    _validate_prompt(plain["prompt"], source)
    return plain


def validate_reward(value: object, source: str = "reward(task, completion)") -> float:
    """`value` as a float: a bool, an int, a float or a NumPy scalar that is finite.

    Raises:
        EnvironmentSetupError: it is anything else, or not finite.
    """
    number = _unwrap(value)
    if not isinstance(number, numbers.Real):
        raise EnvironmentSetupError(f"{source} returned {_show(value)}, not a number")
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise EnvironmentSetupError(f"{source} returned {_show(value)}, not a finite number")
    return result


def _validate_prompt(prompt: object, source: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise EnvironmentSetupError(f"{source} yielded a task with an empty 'prompt'")
        return
    if not isinstance(prompt, list) or not prompt:
        raise EnvironmentSetupError(
            f"{source} yielded a task whose 'prompt' is {_show(prompt)}; use a string or a list of chat "
            "messages"
        )
    for place, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise EnvironmentSetupError(
                f"{source} yielded a task whose 'prompt'[{place}] is {_show(message)}; a chat message is a "
                "dict with the strings 'role' and 'content'"
            )


def _plain(value: object, where: str, source: str) -> Any:
    """`value` rebuilt from exactly the types that JSON knows."""
    value = _unwrap(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise EnvironmentSetupError(
                f"{source} yielded a task that JSON cannot hold: {where} is an integer of {value.bit_length()} bits; "
                "use text"
            )
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise EnvironmentSetupError(f"{source} yielded a task that JSON cannot hold: {where} is {value}")
    if isinstance(value, list):
        return [_plain(item, f"{where}[{place}]", source) for place, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise EnvironmentSetupError(
                    f"{source} yielded a task that JSON would change: {where} has the key {_show(key)}; use "
                    "text"
                )
        return {str(key): _plain(item, f"{where}[{key!r}]", source) for key, item in value.items()}
    raise EnvironmentSetupError(
        f"{source} yielded a task that JSON cannot give back unchanged: {where} is {_show(value)}; tasks are "
        "kept in checkpoints, so use text, numbers, booleans, None, lists and dicts"
    )


def _unwrap(value: object) -> object:
    """The Python number or text in a NumPy scalar or another array of no dimensions; else `value` itself."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return item()
    return value


def _show(value: object) -> str:
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    if len(text) > _SHOWN_CHARS:
        text = text[: _SHOWN_CHARS - 1] + "…"
    return f"{text} ({type(value).__name__})"
