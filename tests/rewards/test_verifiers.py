"""Verifiers read the answer a person would read, and never raise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rewards import exact_match, last_integer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7),
        ("3 + 4 = 7", 7),
        ("It is 7.", 7),
        ("-3", -3),
        ("= -3", -3),
        ("(-3)", -3),
        ("**-3**", -3),
        ("2*-3", -3),
        ("\u22123", -3),
        ("+3", 3),
        ("4-3", 3),
        ("4 - 3", 3),
        ("x-3", 3),
        ("(1)-3", 3),
        ("1,000", 1000),
        ("-1,234,567 in all", -1234567),
        ("1,2", 2),
        ("1,0000", 0),
        ("10,20", 20),
        ("007", 7),
        ("x=12cm", 12),
        ("7.5", None),
        ("3 or 7.5", 3),
        ("none", None),
        ("", None),
        ("5 and " + "9" * 5000, 5),
        ("٣", None),
    ],
)
def test_last_integer(text: str, expected: int | None) -> None:
    assert last_integer(text) == expected


@given(st.text())
def test_last_integer_never_raises(text: str) -> None:
    assert last_integer(text) is None or isinstance(last_integer(text), int)


@given(st.integers(), st.booleans())
def test_an_integer_that_stands_alone_is_found(number: int, thousands: bool) -> None:
    assert last_integer(f"so {number:,} it is" if thousands else f"so {number} it is") == number


def test_exact_match() -> None:
    assert exact_match(" Yes\n", "Yes")
    assert not exact_match("yes", "Yes")
    assert exact_match("yes", "Yes", ignore_case=True)
    assert not exact_match("Yes.", "Yes")
