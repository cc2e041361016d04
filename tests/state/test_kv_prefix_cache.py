"""The prefix cache against a plain list of what was inserted: hits are true, memory is bounded, identities apart."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from headrace.state.kv import KVIdentity, PrefixCache

PLANES, WIDTH = 2, 3
TOKEN_BYTES = PLANES * WIDTH * 8
A = KVIdentity("weights-a", "float64", "", "slot-rows")
OTHERS = [
    A._replace(weights_id="weights-b"),
    A._replace(weight_format="float32"),
    A._replace(adapter="lora-1"),
    A._replace(layout="paged"),
]
tokens_strategy = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def rows_of(identity: KVIdentity, tokens: list[int]) -> Tensor:
    """Rows [planes, tokens, width] that depend on the identity and on every token up to each row, as KV does."""
    generator = torch.Generator().manual_seed(hash(identity) % 2**31)
    base = torch.rand(PLANES, 1, WIDTH, generator=generator, dtype=torch.float64)
    chain = [0.0]
    for token in tokens:
        chain.append((chain[-1] * 7.0 + token + 1.0) % 1_000_003.0)
    return base + torch.tensor(chain[1:], dtype=torch.float64)[None, :, None]


def insert(cache: PrefixCache, identity: KVIdentity, tokens: list[int]) -> None:
    rows = rows_of(identity, tokens)
    cache.insert(identity, tokens, lambda start, stop: [rows[:, start:stop].clone()])


def matched_rows(cache: PrefixCache, identity: KVIdentity, tokens: list[int]) -> Tensor:
    """What a slot would hold after loading the longest cached prefix: [planes, matched, width]."""
    parts = [rows[0][:, :count] for rows, count in cache.match(identity, tokens)]
    return torch.cat([torch.empty(PLANES, 0, WIDTH, dtype=torch.float64), *parts], dim=1)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cache_of(tokens: int, block_size: int = 4) -> PrefixCache:
    return PrefixCache(tokens * TOKEN_BYTES, block_size)


@given(
    inserted=st.lists(tokens_strategy, max_size=8),
    queries=st.lists(tokens_strategy, min_size=1, max_size=5),
    block_size=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None)
def test_with_room_for_all_the_longest_prefix_is_found(
    inserted: list[list[int]], queries: list[list[int]], block_size: int
) -> None:
    """Whole blocks always; within the block where sequences part, what some sequence shares with the query."""
    cache = cache_of(10_000, block_size)
    for tokens in inserted:
        insert(cache, A, tokens)
        cache.check_integrity()
    for query in queries:
        longest = max((common(query, tokens) for tokens in inserted), default=0)
        assert cache.matched_length(A, query) == longest
        assert torch.equal(matched_rows(cache, A, query), rows_of(A, query)[:, :longest])


def test_a_block_of_another_identity_is_never_hit() -> None:
    cache = cache_of(100)
    tokens = [1, 2, 3, 4, 5]
    insert(cache, A, tokens)
    for other in OTHERS:
        assert cache.match(other, tokens) == []
        insert(cache, other, tokens)
        assert torch.equal(matched_rows(cache, other, tokens), rows_of(other, tokens))
    assert torch.equal(matched_rows(cache, A, tokens), rows_of(A, tokens))
    cache.drop(OTHERS[0])
    assert cache.match(OTHERS[0], tokens) == []
    assert cache.matched_length(A, tokens) == 5
    cache.check_integrity()
    assert cache.used_bytes == 4 * 5 * TOKEN_BYTES
    cache.drop(OTHERS[0])
    cache.clear()
    cache.check_integrity()
    assert cache.matched_length(A, tokens) == cache.used_bytes == 0


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    cache = cache_of(100, block_size=2)
    insert(cache, A, [1, 1, 5, 6])
    insert(cache, A, [2, 2, 5, 6])
    assert torch.equal(matched_rows(cache, A, [2, 2, 5, 6]), rows_of(A, [2, 2, 5, 6]))
    assert cache.matched_length(A, [5, 6]) == 0


def test_what_is_cached_is_not_read_again() -> None:
    cache = cache_of(100)
    insert(cache, A, [1, 2, 3, 4, 5, 6])
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> list[Tensor]:
        reads.append((start, stop))
        return [rows_of(A, [1, 2, 3, 4, 5, 6, 7, 8, 9])[:, start:stop]]

    cache.insert(A, [1, 2, 3, 4, 5, 6], read)
    assert reads == []
    cache.insert(A, [1, 2, 3, 4, 5, 6, 7, 8, 9], read)
    assert reads == [(4, 8), (8, 9)]


def test_capacity_zero_caches_nothing_and_reads_nothing() -> None:
    cache = PrefixCache(0)
    cache.insert(A, [1, 2, 3], lambda start, stop: pytest.fail("read"))  # type: ignore[arg-type, return-value]
    assert cache.match(A, [1, 2, 3]) == []
    cache.check_integrity()


def test_a_block_larger_than_the_cache_is_left_out() -> None:
    cache = cache_of(3)
    insert(cache, A, [1, 2, 3, 4])
    assert cache.used_bytes == 0
    insert(cache, A, [1, 2, 3])
    assert cache.matched_length(A, [1, 2, 3]) == 3
    cache.check_integrity()


def test_the_least_recently_used_goes_first() -> None:
    cache = cache_of(12)
    for first in (1, 2, 3):
        insert(cache, A, [first] * 4)
    cache.match(A, [1] * 4)
    cache.matched_length(A, [2] * 4)  # only looked at
    insert(cache, A, [4] * 4)
    assert [cache.matched_length(A, [first] * 4) for first in (1, 2, 3, 4)] == [4, 0, 4, 4]
    cache.check_integrity()


def test_a_chain_goes_from_its_end_and_an_insert_never_evicts_its_own() -> None:
    cache = cache_of(10, block_size=2)
    insert(cache, A, [1] * 10)
    insert(cache, A, [2] * 4)
    assert cache.matched_length(A, [1] * 10) == 6
    assert cache.matched_length(A, [2] * 4) == 4
    insert(cache, A, [3] * 14)
    assert cache.matched_length(A, [3] * 14) == 10
    assert cache.used_bytes == cache.capacity_bytes
    cache.check_integrity()


def test_hits_and_queries_are_counted() -> None:
    cache = cache_of(100)
    insert(cache, A, [1, 2, 3, 4, 5])
    cache.match(A, [1, 2, 3, 4, 9, 9])
    cache.match(A, [9])
    cache.matched_length(A, [1, 2, 3])
    assert (cache.hit_tokens, cache.queried_tokens) == (4, 7)


@pytest.mark.parametrize("damage", ["bytes", "parent", "rows", "partial", "capacity"])
def test_check_integrity_finds_damage(damage: str) -> None:
    cache = cache_of(100)
    insert(cache, A, [1, 2, 3, 4, 5])
    cache.check_integrity()
    root = cache._roots[A]
    child = next(iter(root.children.values()))
    match damage:
        case "bytes":
            cache.used_bytes += 1
        case "parent":
            child.parent = child
        case "rows":
            child.data = [child.data[0][:, :2]]
            cache.used_bytes -= 2 * TOKEN_BYTES
        case "partial":
            child.tokens = (1, 2, 3)
            root.children = {(1, 2, 3): child}
            child.data = [child.data[0][:, :3]]
            cache.used_bytes -= TOKEN_BYTES
        case "capacity":
            cache.capacity_bytes = 1
    with pytest.raises(RuntimeError, match="prefix cache"):
        cache.check_integrity()


def test_blocks_that_lie_elsewhere_only_lead_to_others() -> None:
    """Eviction in the middle of an insert, under blocks that are not resident."""
    cache = cache_of(4, block_size=1)
    insert(cache, A, [1, 2, 3])
    cache.remove(A, cache.root(A).children[(1,)].children[(2,)])  # type: ignore[union-attr]
    cache.check_integrity()
    assert [block.tokens for block, _ in cache.along(A, [1, 2, 3])] == [(1,), (3,)]
    assert cache.matched_length(A, [1, 2, 3]) == 1
    insert(cache, A, [7, 8])
    rows = rows_of(A, [1, 2, 5, 6, 6, 6])
    done = cache.insert(
        A,
        [1, 2, 5, 6, 6, 6],
        lambda start, stop: [rows[:, start:stop].clone()],
        elsewhere=lambda block: block in (1, 2),
    )
    cache.check_integrity()
    assert done == 6
    assert cache.used_bytes == 4 * TOKEN_BYTES
    large = [torch.zeros(PLANES, 1, 9 * WIDTH, dtype=torch.float64)]
    assert cache.insert(A, [1, 2, 5, 9], lambda start, stop: large, elsewhere=lambda block: block < 3) == 3
    cache.check_integrity()


class CacheMachine(RuleBasedStateMachine):
    """A cache too small for what is put into it: every hit is still true."""

    @initialize(capacity=st.integers(0, 30), block_size=st.integers(1, 5))
    def start(self, capacity: int, block_size: int) -> None:
        self.cache = cache_of(capacity, block_size)
        self.inserted: dict[KVIdentity, list[list[int]]] = {}

    @rule(identity=st.sampled_from([A, *OTHERS[:2]]), tokens=tokens_strategy)
    def insert(self, identity: KVIdentity, tokens: list[int]) -> None:
        insert(self.cache, identity, tokens)
        self.inserted.setdefault(identity, []).append(tokens)

    @rule(identity=st.sampled_from([A, *OTHERS[:2]]), tokens=tokens_strategy)
    def match(self, identity: KVIdentity, tokens: list[int]) -> None:
        expected = self.cache.matched_length(identity, tokens)
        rows = matched_rows(self.cache, identity, tokens)
        assert rows.shape[1] == expected
        assert torch.equal(rows, rows_of(identity, tokens)[:, :expected])
        assert expected <= max((common(tokens, t) for t in self.inserted.get(identity, [])), default=0)

    @rule(identity=st.sampled_from([A, *OTHERS[:2]]))
    def drop(self, identity: KVIdentity) -> None:
        self.cache.drop(identity)
        self.inserted.pop(identity, None)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()


def test_any_order_of_operations_in_a_cache_that_is_too_small() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
