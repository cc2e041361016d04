"""One sequence inside the engine.

Invariants
* `token_ids` only grows. `computed` counts its leading tokens whose KV stands in the sequence's slot, so that
  `computed < len(token_ids)` holds between steps (the last token's KV is written when the next one is drawn).
* A sequence without a slot has `computed == 0`.
* `mixed` says that some of its KV was computed under weights older than the current ones; such KV is private
  to the sequence and never enters the prefix cache.
* While it has `arriving` KV, that is copied into its slot piece by piece, and it computes nothing.
* `keep_kv` asks to keep its KV when it ends, for a next turn; `continues` says that it began with such KV.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headrace.types import Sampling


@dataclass(frozen=True, slots=True)
class ArrivingKV:
    """KV of a sequence's first `count` tokens that lies elsewhere: one tensor [planes, >= count, D] per buffer of the
    slots."""

    rows: Sequence[Tensor]
    count: int


@dataclass(slots=True)
class EngineSequence:
    """A request and its progress. `prompt` holds the leading tokens that are not sampled; equal ones are one object."""

    request_id: Hashable
    token_ids: list[int]
    prompt: tuple[int, ...]
    sampling: Sampling
    random_key: int
    priority: tuple[int, ...]
    arrival: int
    stop_token_ids: frozenset[int]
    slot: int | None = None
    computed: int = 0
    mixed: bool = False
    prompt_cached: bool = False
    keep_kv: bool = False
    continues: bool = False
    arriving: ArrivingKV | None = None
    generated_text: str = field(default="")

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """Sorting key: the most urgent first, then the oldest."""
        return (self.priority, self.arrival)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.computed

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def drop_kv(self) -> None:
        """Forget the slot and everything computed in it."""
        self.slot = None
        self.computed = 0
        self.mixed = False
        self.prompt_cached = False
        self.arriving = None


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
