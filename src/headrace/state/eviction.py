"""Which blocks of KV go first when memory is short.

A *policy* gives each block a value; the least valuable ones go. `LeastRecentlyUsed` is the baseline. `CostAware` asks
what a byte is worth: the seconds that computing it again takes, times the chance that it is wanted again, over the
time until then. All three are measured: prefills as they run, reuse per kind of block.

Invariants
* No clock is read here; the time is an argument.
* Of two blocks that differ in their last use only, the one used more recently is worth more.
* Within a chain used as a whole the deepest block goes first: without its ancestors a block is worth nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np


class Kind(IntEnum):
    """What a block is kept for."""

    SHARED = 0
    """A prompt, which other requests may begin with."""
    WAITING = 1
    """A session whose next turn is to come."""
    FINISHED = 2
    """A session that has ended."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What is known of N blocks, one array [N] per fact; times are those of the caller's clock, in seconds."""

    kinds: np.ndarray
    last_used: np.ndarray
    reach: np.ndarray
    """Tokens of the longest chain that was used through the block."""
    depth: np.ndarray
    """Tokens before the block."""
    expected: np.ndarray
    """When its session is expected back; 0 where nobody said."""


class EvictionPolicy(Protocol):
    """Gives blocks their value and learns from what happens to them."""

    def values(self, now: float, facts: BlockFacts) -> np.ndarray:
        """The value [N] of each block; the lowest goes first."""
        ...

    def worth_keeping(self, now: float, facts: BlockFacts) -> np.ndarray:
        """Whether [N] a block that leaves its tier is worth a copy into the next one."""
        ...

    def stored(self, kind: Kind, blocks: int) -> None:
        """Blocks of a kind were stored for the first time."""
        ...

    def reused(self, kind: Kind, blocks: int, idle_s: float) -> None:
        """Blocks of a kind were used again after lying idle."""
        ...

    def prefilled(self, start: int, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` tokens behind `start` others took so long."""
        ...


class LeastRecentlyUsed:
    """The baseline: what was not used for longest goes first."""

    def values(self, now: float, facts: BlockFacts) -> np.ndarray:
        return np.asarray(facts.last_used - 1e-9 * facts.depth, dtype=np.float64)

    def worth_keeping(self, now: float, facts: BlockFacts) -> np.ndarray:
        return np.ones(len(facts.kinds), dtype=bool)

    def stored(self, kind: Kind, blocks: int) -> None: ...

    def reused(self, kind: Kind, blocks: int, idle_s: float) -> None: ...

    def prefilled(self, start: int, tokens: int, seconds: float) -> None: ...


@dataclass(slots=True)
class PrefillCost:
    """Seconds to compute a token at a depth: fixed + slope * depth, fitted to what was measured."""

    FORGET = 0.98
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def observe(self, start: int, tokens: int, seconds: float) -> None:
        x, y = float(tokens), tokens * (start + tokens / 2)
        # Relative errors count, or one long prefill would drown many short ones.
        weight = 1 / max(seconds, 1e-9) ** 2
        new = (x * x * weight, x * y * weight, y * y * weight, x * seconds * weight, y * seconds * weight)
        self._sums = [self.FORGET * old + add for old, add in zip(self._sums, new, strict=True)]

    def per_token(self, depth: np.ndarray) -> np.ndarray:
        """Seconds per token at depths [N]; 1 ms before anything was measured."""
        fixed, slope = self._fit()
        return fixed + slope * np.asarray(depth, dtype=np.float64)

    def _fit(self) -> tuple[float, float]:
        xx, xy, yy, xs, ys = self._sums
        if xx <= 0:
            return 1e-3, 0.0
        determinant = xx * yy - xy * xy
        if determinant > 1e-6 * xx * yy:
            fixed, slope = (yy * xs - xy * ys) / determinant, (xx * ys - xy * xs) / determinant
            if fixed > 0 and slope >= 0:
                return fixed, slope
        return xs / xx, 0.0


@dataclass(slots=True)
class _Reuse:
    """How often blocks of one kind come back, and after how long; a prior counts as `PRIOR` blocks."""

    PRIOR = 64.0
    FORGET_AT = 8192.0
    chance_before: float
    interval_s: float
    started: float = 0.0
    returned: float = 0.0

    @property
    def chance(self) -> float:
        share = (self.returned + self.PRIOR * self.chance_before) / (self.started + self.PRIOR)
        return min(max(share, 1e-4), 0.999)

    def start(self, blocks: float) -> None:
        self.started += blocks
        if self.started > self.FORGET_AT:
            self.started, self.returned = self.started / 2, self.returned / 2

    def come_back(self, blocks: int, idle_s: float) -> None:
        self.returned += blocks
        self.start(blocks)  # and lies idle again
        self.interval_s += (max(idle_s, 1e-3) - self.interval_s) * min(0.1, blocks / self.PRIOR)


class CostAware:
    """Seconds saved per byte and second of keeping: recomputation times chance of reuse over the wait for it."""

    LATE = 3.0
    """A session that is late by so many of its usual waits counts as one that nobody expects."""
    COPY_SHARE = 0.02
    """What copying a block costs as a share of computing it; below this chance of reuse it is not worth it."""

    def __init__(self) -> None:
        self.cost = PrefillCost()
        self.reuse = {
            Kind.SHARED: _Reuse(0.3, 30.0),
            Kind.WAITING: _Reuse(0.9, 30.0),
            Kind.FINISHED: _Reuse(0.02, 30.0),
        }

    def values(self, now: float, facts: BlockFacts) -> np.ndarray:
        chance, wait = self._return(now, facts)
        values = self.cost.per_token(facts.reach) * chance / wait
        # All of a chain is worth the same; a nudge makes its end go first.
        return np.asarray(values * (1 - 1e-7 * facts.depth), dtype=np.float64)

    def worth_keeping(self, now: float, facts: BlockFacts) -> np.ndarray:
        return np.asarray(self._return(now, facts)[0] >= self.COPY_SHARE, dtype=bool)

    def stored(self, kind: Kind, blocks: int) -> None:
        self.reuse[kind].start(blocks)

    def reused(self, kind: Kind, blocks: int, idle_s: float) -> None:
        self.reuse[kind].come_back(blocks, idle_s)

    def prefilled(self, start: int, tokens: int, seconds: float) -> None:
        self.cost.observe(start, tokens, seconds)

    def _return(self, now: float, facts: BlockFacts) -> tuple[np.ndarray, np.ndarray]:
        """The chance [N] that a block is wanted again, given that it was idle so long, and the seconds until then."""
        kinds = np.clip(facts.kinds.astype(np.int64), 0, len(Kind) - 1)
        chances = np.array([self.reuse[kind].chance for kind in Kind])[kinds]
        intervals = np.array([max(self.reuse[kind].interval_s, 1e-3) for kind in Kind])[kinds]
        idle = np.clip(now - facts.last_used, 0, None)
        # Returns after exponentially distributed waits, or never: the longer idle, the likelier never.
        alive = chances * np.exp(-np.minimum(idle / intervals, 600.0))
        chance = alive / (alive + 1 - chances)
        wait = intervals.copy()
        announced = (facts.expected > 0) & (now < facts.expected + self.LATE * intervals)
        chance = np.where(announced, np.maximum(chances, chance), chance)
        ahead = facts.expected - now
        wait = np.where(announced, np.maximum(ahead, 0.1 * intervals), wait)
        return chance, wait


def make_policy(name: str) -> EvictionPolicy:
    """The policy of a setting: "cost" or "lru"."""
    return CostAware() if name == "cost" else LeastRecentlyUsed()


def finite(times: np.ndarray, now: float) -> np.ndarray:
    """Times that may have come from damaged memory, as numbers that cannot lie beyond `now`."""
    return np.minimum(np.nan_to_num(times, nan=0.0, posinf=0.0, neginf=0.0), now)


def is_time(value: float, now: float, at_most_s: float) -> bool:
    """Whether a deadline from memory that may be damaged is one: in the future, and not too far."""
    return math.isfinite(value) and now < value <= now + at_most_s
