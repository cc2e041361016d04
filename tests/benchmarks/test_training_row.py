"""The training rows: both sides take the same gradient, and the linear layers' work is counted right."""

import sys
from collections.abc import Iterator

import pytest

from benchmarks import peers, runs, training
from headrace.config import Config
from headrace.models import resolve

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def ours() -> Iterator[peers.Worker]:
    overrides = ["model.name=tiny-random", "line.groups_per_step=2", "algorithm.group_size=4"]
    with training._headrace(runs.ADDITION, overrides) as worker:
        yield worker


@pytest.fixture(scope="module")
def groups(ours: peers.Worker):
    request = {"do": "sample", "shape": "short", "max_tokens": 12, "forced": True}
    return ours.ask(request, timeout_s=TIMEOUT_S)["groups"]


def test_every_sample_is_real_and_has_an_advantage(groups):
    assert [len(group) for group in groups] == [4, 4]
    samples = [sample for group in groups for sample in group]
    assert all(len(s["completion"]) == len(s["logprobs"]) == 12 for s in samples)
    assert all(s["advantage"] for s in samples)
    assert len({tuple(s["completion"]) for s in samples}) == 8
    assert len({tuple(group[0]["prompt"]) for group in groups}) == 2


def test_both_sides_take_the_same_gradient(ours: peers.Worker, groups):
    algorithm = Config.load(runs.ADDITION).algorithm
    settings = {
        "model": str(resolve("tiny-random")),
        "threads": 1,
        "temperature": 1.0,
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
    }
    # Samples of unequal lengths, so that padding on both sides takes part.
    samples = [dict(sample) for group in groups for sample in group]
    with training._transformers(sys.executable, settings) as theirs:
        mine = ours.ask({"do": "gradient", "shape": "short"}, timeout_s=TIMEOUT_S)
        for size in (3, 8):
            other = theirs.ask({"samples": samples, "micro_batch": size}, timeout_s=TIMEOUT_S)
            training.check_same(mine["norm"], other["norm"], "transformers")
            assert other["loss_sum"] == pytest.approx(mine["loss_sum"], abs=1e-3)
        samples[0]["advantage"] *= 1.5
        other = theirs.ask({"samples": samples, "micro_batch": 8}, timeout_s=TIMEOUT_S)
        with pytest.raises(peers.PeerError, match="transformers: a gradient norm of"):
            training.check_same(mine["norm"], other["norm"], "transformers")


def test_the_profile_counts_all_products_and_all_time(ours: peers.Worker, groups):
    del groups
    found = ours.ask({"do": "profile", "shape": "short"}, timeout_s=TIMEOUT_S)
    # Embedding 64, heads 4 and 2 of 16, MLP 128, three layers; the head has 259 rows.
    layers = 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128)
    prompts_and_answers = found["flops"] / 6
    assert prompts_and_answers > 2 * (40 + 4 * 11) * layers + 2 * (1 + 4 * 11) * 64 * 259
    assert found["linear_s"] == found["breakdown"]["linear layers"] > 0
    assert sum(found["breakdown"].values()) == pytest.approx(found["seconds"], rel=0.05)
    assert 0 < sum(found["others"].values()) <= found["breakdown"]["other operations"] * 1.01
    assert {"attention", "log-probs", "other operations", "Python and autograd"} <= set(found["breakdown"])


def test_the_peer_is_its_better_micro_batch():
    seconds = {"headrace": [1.0, 3.0, 2.0], "micro-batch 16": [9.0, 8.0, 30.0], "micro-batch 64": [9.5] * 3}
    row = training.gradient_row("training", seconds, {})
    assert (row.headrace, row.peer, row.peer_name) == (2.0, 9.0, "transformers, micro-batch 16")
    assert row.ratio == 4.5
    assert row.met is False


def test_the_linear_layers_are_held_against_the_peak():
    profiles = [
        {"flops": 1.5e9, "linear_s": s, "seconds": 2 * s, "breakdown": {"linear layers": s}, "others": {}}
        for s in (0.01, 0.02, 0.005)
    ]
    row = training.gemm_row({"training": profiles}, peak=200e9)
    assert row.headrace == pytest.approx(150.0)
    assert row.share == pytest.approx(0.75)
    assert row.met
    assert row.details["breakdown_s"] == {"training": {"linear layers": 0.01}}


def test_a_shape_says_what_padding_costs():
    sample = {"prompt": [1] * 10, "completion": [2] * 3}
    longer = {"prompt": [1] * 10, "completion": [2] * 5}
    found = training.describe([[sample, longer]])
    assert (found["padded_tokens"], found["packed_tokens"]) == (30, 16)
