"""Runs of blocks for files: every block once, whatever the blocks claim."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.state.eviction import Kind
from headrace.state.tiers.base import BlockKey, FlatBlock, block_keys
from headrace.state.tiers.extent import MAX_BLOCKS, runs


def flat(key: BlockKey, size: int = 8) -> FlatBlock:
    return FlatBlock(key, np.zeros(size, dtype=np.uint8), bytes(16), Kind.SHARED, 0)


def test_a_chain_that_forks_and_one_too_long() -> None:
    identity = bytes(16)
    trunk = block_keys(identity, range(8), 2)
    branch = block_keys(identity, [0, 1, 2, 3, 9, 9, 9, 8], 2)[2:]
    found = runs([flat(key) for key in [*branch[::-1], *trunk[::-1]]])
    assert sorted(len(run) for run in found) == [2, 4]
    for run in found:
        assert all(b.key.parent == a.key.key for a, b in pairwise(run))
    long = runs([flat(key) for key in block_keys(identity, range(2 * (MAX_BLOCKS + 3)), 2)])
    assert [len(run) for run in long] == [MAX_BLOCKS, 3]
    sizes = runs([flat(key, 8 + 8 * (i > 1)) for i, key in enumerate(trunk)])
    assert [len(run) for run in sizes] == [2, 2]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 1)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_claims_that_go_round_in_circles_end(claims: list[tuple[int, int, int]]) -> None:
    blocks = [
        flat(BlockKey(bytes(16), bytes([key]) * 16, bytes([parent]) * 16, b"", 0), size)
        for key, parent, size in claims
    ]
    found = runs(blocks)
    assert sorted(block.key.key for run in found for block in run) == sorted({b.key.key for b in blocks})
