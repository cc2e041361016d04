"""The built-in environment: arithmetic on two integers.

Invariants
* "train" and "test" share no (operator, a, b).
* Both splits are finite and the same in every process; nothing is kept in memory per pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import add, mul, sub
from typing import Any, overload

from headrace.environments.permutation import permute
from headrace.errors import EnvironmentSetupError
from headrace.rewards import last_integer

_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
_HELD_OUT_EVERY = 5


class Arithmetic:
    """What is a + b? Every pair of integers of a range, under each operator.

    All (operator, a, b) stand in one fixed shuffled order, of which every fifth is held out for "test". In
    sorted order every fifth would be whole columns of the table when the range is a multiple of five.

    Args:
        operators: any of `+`, `-` and `*`.
        minimum: the least operand.
        maximum: the greatest operand.
        prompt: the question, with the fields `{a}`, `{op}` and `{b}`.
    """

    def __init__(
        self,
        operators: Iterable[str] = ("+",),
        minimum: int = 1,
        maximum: int = 9,
        prompt: str = "What is {a} {op} {b}? Reply with only the number.",
    ) -> None:
        self._operators = _check_operators(operators)
        for name, value in (("minimum", minimum), ("maximum", maximum)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise EnvironmentSetupError(f"environment.options.{name} must be an integer, not {value!r}")
        if minimum > maximum:
            raise EnvironmentSetupError(
                f"environment.options.minimum ({minimum}) must not be above maximum ({maximum})"
            )
        self._minimum = minimum
        self._width = maximum - minimum + 1
        self._prompt = _check_prompt(prompt)

    def tasks(self, split: str) -> Sequence[dict[str, Any]]:
        """The tasks of a split: dicts with "prompt" and "answer"."""
        return _Pairs(self, held_out=split == "test")

    def reward(self, task: dict[str, Any], completion: str) -> float:
        """1.0 if the last integer of the completion is the answer, else 0.0."""
        return float(last_integer(completion) == task["answer"])

    @property
    def num_pairs(self) -> int:
        """The number of (operator, a, b), both splits together."""
        return len(self._operators) * self._width**2

    def task_at(self, place: int) -> dict[str, Any]:
        """The task at a place of the fixed order."""
        index = permute(place, self.num_pairs, "arithmetic")
        index, b = divmod(index, self._width)
        index, a = divmod(index, self._width)
        operator, a, b = self._operators[index], a + self._minimum, b + self._minimum
        prompt = self._prompt.format(a=a, op=operator, b=b)
        return {"prompt": prompt, "answer": _OPERATIONS[operator](a, b)}


class _Pairs(Sequence[dict[str, Any]]):
    """One split, made when it is read."""

    def __init__(self, arithmetic: Arithmetic, held_out: bool) -> None:
        self._arithmetic = arithmetic
        self._held_out = held_out

    def __len__(self) -> int:
        held_out = self._arithmetic.num_pairs // _HELD_OUT_EVERY
        return held_out if self._held_out else self._arithmetic.num_pairs - held_out

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        if self._held_out:
            return self._arithmetic.task_at(index * _HELD_OUT_EVERY + _HELD_OUT_EVERY - 1)
        block, rest = divmod(index, _HELD_OUT_EVERY - 1)
        return self._arithmetic.task_at(block * _HELD_OUT_EVERY + rest)


def _check_operators(operators: object) -> tuple[str, ...]:
    if not isinstance(operators, (str, list, tuple)) or not operators:
        raise EnvironmentSetupError(
            f'environment.options.operators must be a list such as ["+", "-"], not {operators!r}'
        )
    for operator in operators:
        if not isinstance(operator, str) or operator not in _OPERATIONS:
            raise EnvironmentSetupError(
                f"environment.options.operators: {operator!r} is none of {', '.join(_OPERATIONS)}"
            )
    return tuple(dict.fromkeys(operators))


def _check_prompt(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise EnvironmentSetupError(f"environment.options.prompt must be text, not {prompt!r}")
    examples = ((1, "+", 2), (2, "+", 2), (1, "-", 2), (1, "+", 3))
    try:
        first, *others = [prompt.format(a=a, op=op, b=b) for a, op, b in examples]
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise EnvironmentSetupError(
            f"environment.options.prompt {prompt!r} cannot be filled in ({type(error).__name__}: {error}); "
            "its fields are {a}, {op} and {b}, and {{ and }} are braces"
        ) from None
    if first in others:
        raise EnvironmentSetupError(
            f"environment.options.prompt {prompt!r} must contain {{a}}, {{op}} and {{b}}"
        )
    return prompt
