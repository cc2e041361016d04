"""Generation rows: the same work on every side, the best of the peers, and a limit that nothing can pass."""

import dataclasses
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import generation, limits, peers
from benchmarks.generation import FORMATS, PROMPT_TOKENS, ROWS, TARGETS, WORKLOADS, Workload
from benchmarks.limits import Limits

WEIGHTS = {"layers": 106_168_320, "head": 28_311_552}
BOUNDS = Limits(gemm=300e9, gemm_int8=900e9, bandwidth=33e9, details={})


def test_every_workload_has_a_row_for_each_format():
    assert {generation.split(row) for row in ROWS} == {(name, f) for name in WORKLOADS for f in FORMATS}


def test_rollouts_have_the_lengths_of_reinforcement_learning():
    workload = WORKLOADS["rollouts"]
    assert (workload.prompts, len(workload.lengths)) == (8, 64)
    assert 45 <= statistics.median(workload.lengths) <= 90
    assert max(workload.lengths) <= 512
    assert min(workload.lengths) >= 1
    assert max(workload.lengths) > 4 * statistics.median(workload.lengths)


@given(cap=st.integers(1, 100), seed=st.integers(0, 1000))
def test_lengths_stay_between_one_and_the_cap_and_follow_the_seed(cap: int, seed: int):
    settings = {"middle": 20, "sigma": 2.0, "cap": cap, "seed": seed}
    lengths = generation.lognormal_lengths(50, **settings)
    assert all(1 <= length <= cap for length in lengths)
    assert lengths == generation.lognormal_lengths(50, **settings)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_repetition_has_prompts_that_no_other_had(name: str):
    workload = WORKLOADS[name]
    batches = [workload.batch(f"{name}/{i}") for i in range(3)]
    assert batches[0] == workload.batch(f"{name}/0")
    distinct = [{tuple(ids) for ids in batch["prompts"]} for batch in batches]
    assert all(len(prompts) == workload.prompts for prompts in distinct)
    assert len(set.union(*distinct)) == 3 * workload.prompts
    for batch in batches:
        assert batch["max_tokens"] == list(workload.lengths)
        assert all(len(ids) == PROMPT_TOKENS for ids in batch["prompts"])


def test_samples_of_a_group_share_their_prompt():
    prompts = WORKLOADS["rollouts"].batch("x")["prompts"]
    for group in range(8):
        assert all(ids == prompts[group * 8] for ids in prompts[group * 8 : group * 8 + 8])


def test_one_sequence_is_held_by_the_memory_and_many_by_the_arithmetic():
    limit, name = generation.physical_limit(WORKLOADS["generate_1"], WEIGHTS, BOUNDS, "float32")
    assert name == "memory bandwidth, float32"
    assert limit == pytest.approx(33e9 / (4 * 134_479_872))
    limit, name = generation.physical_limit(WORKLOADS["generate_64"], WEIGHTS, BOUNDS, "float32")
    assert name == "GEMM peak, float32"
    # Per new token: layers and head once, and the layers for its share of the prompt less the last token's.
    operations = 2 * (134_479_872 + 106_168_320 * (45 - 1) / 128)
    assert limit == pytest.approx(300e9 / operations)


def test_int8_reads_a_quarter_and_has_its_own_peak():
    of = {
        (name, f): generation.physical_limit(WORKLOADS[name], WEIGHTS, BOUNDS, f)[0]
        for name in ("generate_1", "generate_64")
        for f in FORMATS
    }
    assert of["generate_1", "int8"] == pytest.approx(4 * of["generate_1", "float32"])
    assert of["generate_64", "int8"] == pytest.approx(3 * of["generate_64", "float32"])


@given(
    prompts=st.integers(1, 4),
    samples=st.integers(1, 8),
    longest=st.integers(1, 600),
    weight_format=st.sampled_from(sorted(FORMATS)),
)
def test_no_schedule_of_forwards_passes_the_limit(
    prompts: int, samples: int, longest: int, weight_format: str
):
    lengths = tuple(1 + (longest * i) // (prompts * samples) for i in range(1, prompts * samples + 1))
    workload = Workload("x", prompts, lengths)
    limit, _ = generation.physical_limit(workload, WEIGHTS, BOUNDS, weight_format)
    # All samples at once, each forward as quick as its arithmetic and its reading allow.
    peak = BOUNDS.gemm_int8 if weight_format == "int8" else BOUNDS.gemm
    reading = sum(WEIGHTS.values()) * FORMATS[weight_format].weight_bytes / BOUNDS.bandwidth
    seconds = 0.0
    for step in range(max(lengths)):
        alive = sum(length > step for length in lengths)
        rows = prompts * PROMPT_TOKENS if step == 0 else alive
        seconds += max(reading, 2 * (WEIGHTS["layers"] * rows + WEIGHTS["head"] * alive) / peak)
    assert workload.tokens / seconds <= limit * (1 + 1e-9)


RATES = {
    "headrace float32": [600.0, 660.0, 640.0],
    "headrace int8": [1500.0, 1400.0, 1450.0],
    "vLLM float32 eager": [500.0, 900.0, 510.0],
    "vLLM float32 compiled": [520.0, 530.0, 400.0],
    "vLLM bfloat16 eager": [1000.0, 990.0, 980.0],
    "vLLM bfloat16 compiled": [100.0, 990.0, 985.0],
}


def test_a_row_is_held_against_the_best_median_of_its_peers():
    workload = WORKLOADS["generate_64"]
    row = generation.make_row("generate_64", workload, RATES, WEIGHTS, BOUNDS, {"settings": {}})
    assert (row.headrace, row.peer, row.peer_name) == (640.0, 520.0, "vLLM float32 compiled")
    assert row.ratio == pytest.approx(640 / 520)
    assert (row.target, row.met) == (TARGETS["generate_64"], True)
    row = generation.make_row("generate_64_int8", workload, RATES, WEIGHTS, BOUNDS, {"settings": {}})
    assert (row.headrace, row.peer, row.peer_name) == (1450.0, 990.0, "vLLM bfloat16 eager")
    assert not row.met
    assert row.details["tokens_per_second"]["vLLM bfloat16 compiled"]["all"] == [100.0, 990.0, 985.0]


def test_headrace_answers_as_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "MODEL", "tiny-random")
    monkeypatch.setattr(generation, "VOCABULARY", range(10, 50))
    monkeypatch.setattr(generation.report, "cores", lambda: 1)
    workload = Workload("x", 2, (1, 5, 3, 2))
    with generation.start_headrace("float32") as worker:
        assert worker.ready["threads"] == 1
        assert all(count > 0 for count in worker.ready["weights"].values())
        rates = generation.in_turn("x", workload, {"headrace float32": worker}, repetitions=2)
        assert len(rates["headrace float32"]) == 2
        assert all(rate > 0 for rate in rates["headrace float32"])
        shorter = dataclasses.replace(workload, lengths=(1, 5, 3, 1))
        with pytest.raises(peers.PeerError, match="headrace: drew 11 tokens instead of 10"):
            generation.tokens_per_second("headrace", worker, shorter, workload.batch("y"))


def test_vllm_gets_this_processs_cores_and_its_libraries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation.ctypes.util, "find_library", lambda name: f"lib{name}.so.4")
    monkeypatch.setattr(generation.report, "core_numbers", lambda: [2, 3, 7])
    environment = generation.vllm_environment()
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3,7"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["LD_PRELOAD"].startswith("libtcmalloc_minimal.so.4:")


def test_without_tcmalloc_the_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(peers.PeerError, match="install Debian's package libtcmalloc-minimal4"):
        generation.vllm_environment()


def test_a_limit_is_the_best_way_by_its_median():
    ways = {"steady": [2.0, 3.0, 2.5], "lucky once": [9.0, 1.0, 1.0]}
    assert limits.best(ways) == {"best": "steady", "median": 2.5, "ways": ways}
