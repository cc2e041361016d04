"""Every generated token ends in exactly one bucket."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule import Bucket, Ledger

BUCKETS = ["trained", "zero_advantage", "dropped_stale", "masked", "environment_failed", "aborted", "lost"]


@given(st.lists(st.tuples(st.sampled_from(["generate", *BUCKETS]), st.integers(0, 50))))
def test_books_follow_every_history(events: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    generated, settled = 0, dict.fromkeys(BUCKETS, 0)
    for kind, tokens in events:
        in_flight = generated - sum(settled.values())
        if kind == "generate":
            ledger.generate(tokens)
            generated += tokens
        elif tokens <= in_flight:
            ledger.settle(kind, tokens)
            settled[kind] += tokens
        else:
            with pytest.raises(ValueError, match=f"{in_flight} are in flight"):
                ledger.settle(kind, tokens)
        assert ledger.to_dict() == {"generated": generated} | settled
        in_flight = generated - sum(settled.values())
        assert ledger.in_flight == in_flight
        ledger.check(in_flight)
        assert not ledger.balanced(in_flight + 1)
        restored = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
        assert restored.to_dict() == ledger.to_dict()


def test_an_imbalance_names_its_numbers() -> None:
    ledger = Ledger()
    ledger.generate(100)
    ledger.settle("trained", 60)
    ledger.settle(Bucket.LOST, 3)
    assert ledger.balanced(37)
    assert ledger.summary() == "100 generated: 60 trained, 3 lost, 37 in flight"
    with pytest.raises(RuntimeError, match=r"holds 36 tokens.*say 37 \(100 generated: 60 trained, 3 lost"):
        ledger.check(36)


def test_wrong_bookings_raise_and_change_nothing() -> None:
    ledger = Ledger()
    ledger.generate(5)
    with pytest.raises(ValueError, match="unknown ledger bucket 'gone'; known: trained, zero_advantage"):
        ledger.settle("gone", 1)
    with pytest.raises(ValueError, match="cannot settle 6 tokens as masked: 5 are in flight"):
        ledger.settle("masked", 6)
    with pytest.raises(ValueError, match="cannot settle -1"):
        ledger.settle("masked", -1)
    with pytest.raises(ValueError, match="cannot generate -1"):
        ledger.generate(-1)
    assert ledger.to_dict() == {"generated": 5} | dict.fromkeys(BUCKETS, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gone": 1}, "has the entries"),
        ({"trained": -1}, "numbers of tokens"),
        ({"trained": 1.0}, "numbers of tokens"),
        ({"trained": 6}, "more than was generated"),
    ],
)
def test_damaged_books_are_refused(changes: dict[str, object], message: str) -> None:
    books = {"generated": 5} | dict.fromkeys(BUCKETS, 0)
    with pytest.raises(ValueError, match=message):
        Ledger.from_dict(books | changes)
    with pytest.raises(ValueError, match="has the entries"):
        Ledger.from_dict({"generated": 5})
