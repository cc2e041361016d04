"""The lazy permutation is one, for every size, and keys give different ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.permutation import permute


@settings(max_examples=40)
@given(st.integers(1, 300), st.text(max_size=5))
def test_it_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_keys_give_different_orders_that_are_not_sorted() -> None:
    first, second = ([permute(i, 100, key) for i in range(100)] for key in ("0:0", "0:1"))
    assert first != second
    assert list(range(100)) not in (first, second)
    fixed_points = sum(permute(i, 100, str(key)) == i for key in range(50) for i in range(100))
    assert 20 < fixed_points < 100  # a random permutation has one on average


def test_a_huge_range_needs_no_list() -> None:
    assert 0 <= permute(10**18 - 1, 10**18, "x") < 10**18


def test_outside_the_range_is_an_error() -> None:
    with pytest.raises(IndexError):
        permute(5, 5, "x")
