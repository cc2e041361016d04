"""What an environment's methods return, checked and made plain.

Invariants
* What is validated holds only what JSON gives back unchanged, so that a task or a reply out of a checkpoint
  equals the one that was served.
* A validated reward is a finite float of at most `MAX_REWARD` in size.
* Validated data is nested at most `MAX_DEPTH` deep, whatever recursion the user's code allows itself.
* A validated message has a role and text, or a role and tool calls.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from headrace.environments.base import Observation, Step
from headrace.environments.options import shortened, suggest
from headrace.errors import EnvironmentSetupError

MAX_INTEGER_BITS = 10_000
"""Larger integers cannot be written as decimal text, which Python limits to 4,300 digits."""

MAX_DEPTH = 100
"""Lists and dicts within each other. What writes and reads them is recursive, with Python's usual limit of 1,000."""

MAX_REWARD = 1e12
"""Far larger than any reward, and still far from float32's end at 3.4e38."""

_SHOWN_CHARS = 60
_STEP_FIELDS = ("observation", "reward", "done", "info")


def validate_task(task: object, source: str = "tasks", *, with_prompt: bool = True) -> dict[str, Any]:
    """A copy of `task` as plain data, NumPy scalars converted to numbers.

    Args:
        task: what an environment yielded.
        source: the call it came from, for the error's text.
        with_prompt: whether it needs a usable "prompt", as the `tasks` + `reward` form does.

    Raises:
        EnvironmentSetupError: it is no dict, lacks its prompt, or holds something that JSON would not give
            back unchanged.
    """
    needs = " with at least 'prompt'" if with_prompt else ""
    if not isinstance(task, dict):
        raise EnvironmentSetupError(f"{source} yielded {_show(task)}; yield a dict{needs}")
    if with_prompt and "prompt" not in task:
        keys = ", ".join(repr(key) for key in task) or "none"
        raise EnvironmentSetupError(f"{source} yielded a task without 'prompt' (its keys: {keys})")
    plain: dict[str, Any] = _plain(task, "task", f"{source} yielded a task")
    if with_prompt:
        _validate_prompt(plain["prompt"], source)
    return plain


def validate_reward(value: object, source: str = "reward(task, completion)") -> float:
    """`value` as a float: a bool, an int, a float or a NumPy scalar of at most `MAX_REWARD` in size.

    Raises:
        EnvironmentSetupError: it is anything else, not finite, or larger.
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
    if abs(result) > MAX_REWARD:
        raise EnvironmentSetupError(
            f"{source} returned {_show(value)}, a number too large for a reward; keep it between {-MAX_REWARD:g} and "
            f"{MAX_REWARD:g}"
        )
    return result


def episode_reward(turn_rewards: Iterable[float]) -> float:
    """What an episode is worth: the sum of its turns' rewards.

    Raises:
        EnvironmentSetupError: no reward may be as large as the sum.
    """
    total = sum(turn_rewards, 0.0)
    if not abs(total) <= MAX_REWARD:
        raise EnvironmentSetupError(
            f"the rewards of the episode's turns add up to {total:g}; keep the sum between {-MAX_REWARD:g} and "
            f"{MAX_REWARD:g}"
        )
    return total


def validate_observation(value: object, source: str = "reset(task)") -> Observation:
    """`value` as an Observation of plain data.

    It may be one, a dict with its fields, a list of messages, or a string: one message of the user's.

    Raises:
        EnvironmentSetupError: it is none of these, or one of its messages or tools is not valid.
    """
    messages: Any
    tools: Any
    if isinstance(value, Observation):
        messages, tools = value.messages, value.tools
    elif isinstance(value, dict):
        _refuse_unknown(value, ("messages", "tools"), source, "an observation")
        messages, tools = value.get("messages", []), value.get("tools", [])
    elif isinstance(value, str):
        messages, tools = [{"role": "user", "content": value}], []
    else:
        messages, tools = value, []
    if not isinstance(messages, list):
        raise EnvironmentSetupError(
            f"{source} returned {_show(value)}; return an Observation, a list of chat messages or a string"
        )
    if not messages or (isinstance(value, str) and not value):
        raise EnvironmentSetupError(f"{source} returned an observation that says nothing; give it a message")
    if not isinstance(tools, list):
        raise EnvironmentSetupError(f"{source} returned tools that are {_show(tools)}; use a list of schemas")
    what = f"{source} returned an observation"
    messages, tools = _plain(messages, "messages", what), _plain(tools, "tools", what)
    for place, message in enumerate(messages):
        _validate_message(message, f"messages[{place}]", what)
    for place, tool in enumerate(tools):
        _validate_tool(tool, f"tools[{place}]", what)
    return Observation(messages, tools)


def validate_step(value: object, source: str = "step(action)") -> Step:
    """`value` as a Step of plain data.

    It may be one, a dict with its fields, or a tuple of them in their order, of at least three.

    Raises:
        EnvironmentSetupError: it is none of these, a field is not valid, or it goes on without an observation.
    """
    if isinstance(value, Step):
        fields = {name: getattr(value, name) for name in _STEP_FIELDS}
    elif isinstance(value, dict):
        _refuse_unknown(value, _STEP_FIELDS, source, "a step")
        fields = value
    elif isinstance(value, tuple) and 3 <= len(value) <= len(_STEP_FIELDS):
        fields = dict(zip(_STEP_FIELDS, value, strict=False))
    else:
        raise EnvironmentSetupError(
            f"{source} returned {_show(value)}; return a Step, or a dict with {', '.join(_STEP_FIELDS)}"
        )
    done = _unwrap(fields.get("done", False))
    if not isinstance(done, bool):
        raise EnvironmentSetupError(
            f"{source} returned a step whose done is {_show(done)}; use True or False"
        )
    info = fields.get("info", {})
    if not isinstance(info, dict):
        raise EnvironmentSetupError(f"{source} returned a step whose info is {_show(info)}; use a dict")
    observation = fields.get("observation")
    if observation is not None:
        observation = validate_observation(observation, source)
    elif not done:
        raise EnvironmentSetupError(
            f"{source} returned a step that is not done and has no observation; say what the policy sees next, or "
            "that the episode is done"
        )
    return Step(
        observation,
        validate_reward(fields.get("reward", 0.0), source),
        done,
        _plain(info, "info", f"{source} returned a step"),
    )


def validate_snapshot(value: object) -> Any:
    """`value` as plain data. Raises EnvironmentSetupError where JSON would not give it back, or for None."""
    if value is None:
        raise EnvironmentSetupError("snapshot() returned None; return what restore needs, as JSON data")
    return _plain(value, "snapshot", "snapshot() returned data")


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


def _validate_message(message: object, where: str, what: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise EnvironmentSetupError(
            f"{what} whose {where} is {_show(message)}; a chat message is a dict with the strings 'role' and "
            "'content'"
        )
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(map(_is_tool_call, calls))):
        raise EnvironmentSetupError(
            f"{what} whose {where}['tool_calls'] is {_show(calls)}; a tool call is "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )
    if isinstance(message.get("content"), str) or (calls and message.get("content") is None):
        return
    raise EnvironmentSetupError(
        f"{what} whose {where}['content'] is {_show(message.get('content'))}; use a string (only a message with "
        "'tool_calls' may go without)"
    )


def _is_tool_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _validate_tool(tool: object, where: str, what: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    wanted = {"name": str, "description": str, "parameters": dict}
    if not isinstance(function, dict):
        wrong = _show(tool)
    elif missing := [name for name, kind in wanted.items() if not isinstance(function.get(name), kind)]:
        wrong = f"without a proper {missing[0]!r}"
    else:
        return
    raise EnvironmentSetupError(
        f"{what} whose {where} is {wrong}; a tool is "
        '{"type": "function", "function": {"name": text, "description": text, "parameters": JSON schema}}'
    )


def _refuse_unknown(value: dict[Any, Any], known: tuple[str, ...], source: str, what: str) -> None:
    for key in value:
        if key not in known:
            hint = suggest(str(key), known) or f"; it has {', '.join(known)}"
            raise EnvironmentSetupError(f"{source} returned {what} with the unknown field {key!r}{hint}")


def _plain(value: object, where: str, what: str, depth: int = 0) -> Any:
    """`value`, within `depth` lists and dicts, rebuilt from exactly the types that JSON knows."""
    value = _unwrap(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise EnvironmentSetupError(
                f"{what} that JSON cannot hold: {where} is an integer of {value.bit_length()} bits; use text"
            )
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise EnvironmentSetupError(f"{what} that JSON cannot hold: {where} is {value}")
    if isinstance(value, list | dict) and depth == MAX_DEPTH:
        start = where if len(where) <= _SHOWN_CHARS else f"{where[:_SHOWN_CHARS]}…"
        raise EnvironmentSetupError(
            f"{what} with lists and dicts nested more than {MAX_DEPTH} deep, at {start}; make it flatter"
        )
    if isinstance(value, list):
        return [_plain(item, f"{where}[{place}]", what, depth + 1) for place, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise EnvironmentSetupError(
                    f"{what} that JSON would change: {where} has the key {_show(key)}; use text"
                )
        return {str(key): _plain(item, f"{where}[{key!r}]", what, depth + 1) for key, item in value.items()}
    raise EnvironmentSetupError(
        f"{what} that JSON cannot give back unchanged: {where} is {_show(value)}; it is kept in checkpoints, so "
        "use text, numbers, booleans, None, lists and dicts"
    )


def _unwrap(value: object) -> object:
    """The Python number or text in a NumPy scalar or another array of no dimensions; else `value` itself."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return item()
    return value


def _show(value: object) -> str:
    if value is None:
        return "None"
    text = shortened(" ".join(repr(value).split()), _SHOWN_CHARS)
    return f"{text} ({type(value).__name__})"
