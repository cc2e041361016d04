"""The tasks of one split as an endless sequence: the task at any index can be asked for.

Invariants
* The task at an index is a function of (environment, split, seed) alone: it does not depend on what was
  asked before, so a resumed run meets the same tasks.
* A finite "train" is reshuffled every epoch by (seed, epoch). One exception: if its end only shows beyond the first
  10,000 tasks, its first epoch keeps its own order. An endless "train" and every "test" keep their own order.
* Every task that is returned was validated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.environments.base import Caller, ConversationEnvironment, Environment, is_conversation
from headrace.environments.permutation import permute
from headrace.environments.validation import validate_task
from headrace.errors import EnvironmentSetupError

READ_AHEAD = 10_000
"""How far into "train" to look for its end, and how many tasks of an endless one are kept for going back."""

_END = object()


class TaskStream:
    """Tasks of one split by their index.

    Args:
        environment: where they come from; its `tasks(split)` is called when the first one is asked for.
        split: "train" or "test".
        seed: shuffles "train".
        caller: runs the environment's async methods; its own by default.
        on_read: called with the number of tasks read so far after each one read from an iterator.
    """

    def __init__(
        self,
        environment: Environment | ConversationEnvironment,
        split: str,
        seed: int,
        caller: Caller | None = None,
        on_read: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._environment = environment
        self._split = split
        self._seed = seed
        self._caller = caller or Caller()
        self._on_read = on_read
        self._source = f"tasks({split!r})"
        self._with_prompt = not is_conversation(environment)
        self._items: Sequence[Any] | None = None
        self._first_epoch_in_order = split != "train"
        self._forget()

    @property
    def length(self) -> int | None:
        """The number of tasks of one epoch, or None as long as no end was seen."""
        return None if self._items is None else len(self._items)

    def get(self, index: int) -> dict[str, Any]:
        """The task at place `index` >= 0; a finite split starts again after its last one.

        Raises:
            EnvironmentSetupError: the split is empty, is no iterable, differs between two readings, or the
                task is not valid. What the environment itself raises passes through.
        """
        return self._validate(self._raw(index))

    def first(self, count: int) -> list[dict[str, Any]]:
        """The first `count` tasks, or all of one epoch where it has fewer. Raises as `get` does."""
        tasks: list[dict[str, Any]] = []
        while len(tasks) < count:
            task = self._raw(len(tasks))
            if self._items is not None and len(tasks) >= len(self._items):
                break
            tasks.append(self._validate(task))
        return tasks

    def _validate(self, task: object) -> dict[str, Any]:
        return validate_task(task, self._source, with_prompt=self._with_prompt)

    def _raw(self, index: int) -> Any:
        if self._items is None:
            try:
                self._read_to(index)
            except BaseException:
                self._forget()  # a generator that raised is spent: the next call starts it anew
                raise
        if self._items is None:
            return self._kept[index - self._kept_from]
        epoch, place = divmod(index, len(self._items))
        if self._split == "train" and (epoch > 0 or not self._first_epoch_in_order):
            place = permute(place, len(self._items), f"{self._seed}:{epoch}")
        return self._items[place]

    def _forget(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._kept: deque[Any] = deque()
        self._kept_from = 0

    @property
    def _num_read(self) -> int:
        return self._kept_from + len(self._kept)

    def _read_to(self, index: int) -> None:
        """Read until place `index` is kept, or the split's end is known and `_items` is set."""
        if index < self._kept_from:
            self._forget()
        if self._iterator is None:
            source = self._open()
            if hasattr(source, "__len__"):
                self._items = self._not_empty(source if hasattr(source, "__getitem__") else list(source))
                return
            self._iterator = self._caller.iterate(source)
        target = max(index, READ_AHEAD) if self._split == "train" else index
        while self._num_read <= target:
            item = next(self._iterator, _END)
            if item is _END:
                self._finish()
                return
            self._kept.append(item)
            if len(self._kept) > READ_AHEAD + 1:
                self._kept.popleft()
                self._kept_from += 1
            self._on_read(self._num_read)

    def _finish(self) -> None:
        """The iterator ended: hold all tasks, so that any can be asked for from now on."""
        count = self._num_read
        self._first_epoch_in_order |= count > READ_AHEAD
        items = list(self._kept) if self._kept_from == 0 else self._read_again(count)
        self._items = self._not_empty(items)
        self._forget()

    def _read_again(self, count: int) -> list[Any]:
        items = []
        for item in self._caller.iterate(self._open()):
            items.append(item)
            self._on_read(len(items))
        if len(items) != count:
            raise EnvironmentSetupError(
                f"{self._source} gave {count} tasks and, called again, {len(items)}; it must give the same "
                "every time"
            )
        return items

    def _open(self) -> Any:
        source = self._caller.call(self._environment.tasks, self._split)
        iterable = isinstance(source, (Iterable, AsyncIterable)) or (
            hasattr(source, "__len__") and hasattr(source, "__getitem__")
        )
        if not iterable or isinstance(source, (str, bytes, Mapping)):
            raise EnvironmentSetupError(
                f"{self._source} returned {type(source).__name__}; yield the tasks, or return a list of them"
            )
        return source

    def _not_empty(self, items: Sequence[Any]) -> Sequence[Any]:
        if len(items) == 0:
            raise EnvironmentSetupError(f"{self._source} is empty; it must give at least one task")
        return items
