"""The agreement rows: everything that could make a difference takes part, or there is no result."""

import pytest

from benchmarks import agreement, peers

REQUEST = agreement.REQUEST | {
    "engine": {
        "max_sequences": 12,
        "context_length": 512,
        "max_batch_tokens": 48,
        "kv_memory_mb": 1,
        "prefix_cache_mb": 8,
    },
    "groups": 2,
    "samples": 8,
    "max_tokens": 64,
    "switches": 2,
    "learning_rate": 1e-3,
}


def test_tokens_agree_across_switches_preemption_and_cached_prefixes():
    result = agreement.compare("tiny-random", REQUEST)
    assert result["tokens"] == 2 * 8 * 64
    assert [version["tokens"] > 0 for version in result["per_version"]] == [True] * 3
    assert 0 < result["mean"] < 1e-5
    assert result["max"] < 1e-3


RESULT = {
    "tokens": 1024,
    "prefix_hit_tokens": 10,
    "chunked_prompts": 2,
    "preemptions": 3,
    "switches_in_flight": 2,
}


def test_a_result_that_covers_everything_is_taken():
    agreement.check(RESULT, REQUEST)


@pytest.mark.parametrize("name", [*agreement.COVERED, "switches_in_flight"])
def test_a_result_in_which_something_did_not_happen_is_refused(name: str):
    with pytest.raises(peers.PeerError, match=f"agreement: {name} did not take part"):
        agreement.check(RESULT | {name: 0}, REQUEST)


def test_a_result_over_fewer_tokens_is_refused():
    with pytest.raises(peers.PeerError, match="1023 tokens were compared instead of 1024"):
        agreement.check(RESULT | {"tokens": 1023}, REQUEST)


def test_the_row_compares_more_than_ten_thousand_tokens():
    request = agreement.REQUEST
    assert request["groups"] * request["samples"] * request["max_tokens"] > 10_000
