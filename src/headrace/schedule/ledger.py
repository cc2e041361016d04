"""The account of generated tokens: each one ends in exactly one bucket.

Invariant: generated = the sum of all buckets + in flight, and in flight is never negative. `check` compares
the in-flight balance with a count of what the line really holds, so that a token that was lost or settled
twice shows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self


class Bucket(StrEnum):
    """Where a generated token can end."""

    TRAINED = "trained"
    """In the loss of a step with a non-zero advantage."""
    ZERO_ADVANTAGE = "zero_advantage"
    """In a group whose rewards were all equal."""
    DROPPED_STALE = "dropped_stale"
    """Dropped for its age, by an explicit setting."""
    MASKED = "masked"
    """Left out of the loss, for example a truncated completion."""
    ENVIRONMENT_FAILED = "environment_failed"
    """In an attempt that the environment failed."""
    ABORTED = "aborted"
    """In a trajectory that was stopped before it ended."""
    LOST = "lost"
    """Generated after the state that a resume restored."""


class Ledger:
    """Counts generated tokens and settles them into buckets.

    Attributes:
        generated: tokens sampled so far.
        settled: tokens per bucket.
    """

    def __init__(self) -> None:
        self.generated = 0
        self.settled: dict[Bucket, int] = dict.fromkeys(Bucket, 0)

    @property
    def in_flight(self) -> int:
        """Tokens that were generated and have not ended in a bucket."""
        return self.generated - sum(self.settled.values())

    def generate(self, tokens: int) -> None:
        """Account for `tokens` newly sampled ones.

        Raises:
            ValueError: a negative number.
        """
        if tokens < 0:
            raise ValueError(f"cannot generate {tokens} tokens")
        self.generated += tokens

    def settle(self, bucket: Bucket | str, tokens: int) -> None:
        """Move `tokens` from in flight into a bucket, for good.

        Raises:
            ValueError: an unknown bucket, a negative number, or more tokens than are in flight.
        """
        try:
            bucket = Bucket(bucket)
        except ValueError:
            raise ValueError(f"unknown ledger bucket {bucket!r}; known: {', '.join(Bucket)}") from None
        if not 0 <= tokens <= self.in_flight:
            raise ValueError(f"cannot settle {tokens} tokens as {bucket}: {self.in_flight} are in flight")
        self.settled[bucket] += tokens

    def balanced(self, in_flight_counted: int) -> bool:
        """Whether the line holds exactly the tokens that the books say are in flight."""
        return self.in_flight == in_flight_counted

    def check(self, in_flight_counted: int) -> None:
        """Compare the books with the number of tokens that the line holds.

        Raises:
            RuntimeError: they differ; the message has every number.
        """
        if not self.balanced(in_flight_counted):
            raise RuntimeError(
                f"the token ledger does not balance: the line holds {in_flight_counted} tokens in flight, "
                f"the books say {self.in_flight} ({self.summary()})"
            )

    def summary(self) -> str:
        """One line: the number generated, every bucket that is not empty, and the rest in flight."""
        parts = [f"{tokens} {bucket}" for bucket, tokens in self.settled.items() if tokens]
        return f"{self.generated} generated: {', '.join([*parts, f'{self.in_flight} in flight'])}"

    def to_dict(self) -> dict[str, int]:
        """The books as plain JSON data: `generated` and one entry per bucket."""
        return {"generated": self.generated} | {bucket.value: n for bucket, n in self.settled.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore what `to_dict` returned.

        Raises:
            ValueError: a missing or unknown entry, one that is not a number of tokens, or more tokens settled
                than generated.
        """
        expected = {"generated", *Bucket}
        if set(data) != expected:
            raise ValueError(f"a ledger has the entries {sorted(expected)}, not {sorted(data)}")
        if not all(type(n) is int and n >= 0 for n in data.values()):
            raise ValueError(f"a ledger's entries are numbers of tokens, not {dict(data)}")
        ledger = cls()
        ledger.generated = data["generated"]
        ledger.settled = {bucket: data[bucket.value] for bucket in Bucket}
        if ledger.in_flight < 0:
            raise ValueError(f"a ledger cannot settle more than was generated: {ledger.summary()}")
        return ledger
