"""Rows of generation: headrace against vLLM, new tokens per second on the same prompts and lengths.

A batch of random prompts is answered by every side in turn, several times, each time with fresh prompts, so that no
side has seen one before. headrace runs in float32 and with int8 weights; vLLM compiled and not, in float32 and, for
the int8 rows, in bfloat16; a row takes the best of them. Prefill is in the time.

`generate_N`: N prompts of 45 tokens, 128 new tokens each. `rollouts`: what RL asks for, 8 prompts x 8 samples whose
lengths are lognormal. Both with temperature 1, nothing cut off, and end-of-sequence ignored.

Invariants
* A repetition's prompts and lengths are the same on every side, and every side drew exactly so many tokens.
* float32 and int8 rows of one workload come out of the same repetitions.
"""

from __future__ import annotations

import ctypes.util
import math
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import limits, peers, report
from benchmarks.limits import Limits
from benchmarks.report import Row

MODEL = "smollm2-135m"
PROMPT_TOKENS = 45
VOCABULARY = range(1000, 49000)
"""Prompts are drawn from these ids: all of them ordinary text."""

CONTEXT = 640
MAX_SEQUENCES = 64
REPETITIONS = 3

VLLM_BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention is made for: so a prompt that samples share fills one and is shared."""

VLLM_KV_GB = 2
"""More than any workload here fills."""

START_TIMEOUT_S = 900.0
BATCH_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch's shape.

    Args:
        what: in words.
        prompts: how many different ones.
        lengths: new tokens of every sample; consecutive samples share a prompt.
    """

    what: str
    prompts: int
    lengths: tuple[int, ...]

    def batch(self, seed: str) -> dict[str, Any]:
        """Prompts and lengths of one repetition; another seed gives other prompts."""
        rng = random.Random(seed)
        samples = len(self.lengths) // self.prompts
        distinct = [rng.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(self.prompts)]
        return {
            "prompts": [ids for ids in distinct for _ in range(samples)],
            "max_tokens": list(self.lengths),
            "seed": seed,
        }

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def lognormal_lengths(count: int, *, middle: int, sigma: float, cap: int, seed: int) -> tuple[int, ...]:
    """Lengths whose logarithms are normal around that of `middle`, from 1 to `cap`."""
    rng = random.Random(seed)
    drawn = (round(rng.lognormvariate(math.log(middle), sigma)) for _ in range(count))
    return tuple(min(max(length, 1), cap) for length in drawn)


def _uniform(sequences: int) -> Workload:
    plural = "sequences" if sequences > 1 else "sequence"
    return Workload(f"generation, {sequences} {plural} x 128 tokens", sequences, (128,) * sequences)


WORKLOADS = {
    "generate_64": _uniform(64),
    "generate_8": _uniform(8),
    "generate_1": _uniform(1),
    "rollouts": Workload(
        "rollouts, 8 prompts x 8 samples, lengths of RL",
        8,
        lognormal_lengths(64, middle=64, sigma=1.0, cap=512, seed=0),
    ),
}


@dataclass(frozen=True, slots=True)
class Format:
    """What headrace generates with, and what is known about it.

    Args:
        engine: fields of `[engine]`.
        peer_dtypes: vLLM's that it is held against.
        weight_bytes: bytes of one weight.
    """

    engine: dict[str, Any]
    peer_dtypes: tuple[str, ...]
    weight_bytes: int


FORMATS = {
    "float32": Format({}, ("float32",), 4),
    "int8": Format({"weight_format": "int8"}, ("float32", "bfloat16"), 1),
}

TARGETS = {
    "generate_64": 1.1,
    "generate_8": 1.1,
    "generate_1": 1.0,
    "rollouts": 1.1,
    "generate_64_int8": 1.7,
    "generate_8_int8": 1.4,
    "generate_1_int8": 1.2,
    "rollouts_int8": 1.7,
}

ROWS = tuple(TARGETS)


def split(row: str) -> tuple[str, str]:
    """A row's workload and headrace's format."""
    workload = row.removesuffix("_int8")
    return workload, "int8" if workload != row else "float32"


def measure(rows: Sequence[str]) -> dict[str, Row]:
    """The wanted rows of ROWS, in one session."""
    return session(rows, WORKLOADS, REPETITIONS, eager=(True, False))


def session(
    rows: Sequence[str], workloads: Mapping[str, Workload], repetitions: int, eager: Sequence[bool]
) -> dict[str, Row]:
    """Start every side that the rows need, answer every workload with each of them in turn, and make the rows.

    Raises:
        PeerError: a side cannot be started or measured.
    """
    bounds = limits.measured()
    formats = {split(row)[1] for row in rows}
    dtypes = {dtype for name in formats for dtype in FORMATS[name].peer_dtypes}
    wanted = [name for name in workloads if any(split(row)[0] == name for row in rows)]
    rates: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        sides = {ours(name): stack.enter_context(start_headrace(name)) for name in sorted(formats)}
        weights = next(iter(sides.values())).ready["weights"]
        for dtype in sorted(dtypes, reverse=True):
            for plain in eager:
                sides[theirs(dtype, plain)] = stack.enter_context(start_vllm(dtype, plain))
        starts = {side: worker.ready["start_s"] for side, worker in sides.items()}
        for name in wanted:
            rates[name] = in_turn(name, workloads[name], sides, repetitions)
    details = {
        "settings": {
            "model": MODEL,
            "prompt_tokens": PROMPT_TOKENS,
            "temperature": 1.0,
            "repetitions_after_a_warm_up": repetitions,
        },
        "start_seconds": starts,
        "matrix_weights": weights,
        "versions": versions(),
    }
    made = {}
    for row in rows:
        name, _ = split(row)
        made[row] = make_row(row, workloads[name], rates[name], weights, bounds, details)
    if "generate_64" in made:
        made["generate_64"].details["transformers_generate"] = transformers(workloads["generate_64"])
    return made


def in_turn(
    name: str, workload: Workload, sides: Mapping[str, peers.Worker], repetitions: int
) -> dict[str, list[float]]:
    """Tokens per second of each side in each repetition, after one that does not count.

    Raises:
        PeerError: a side failed, or drew another number of tokens than it was asked for.
    """
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(repetitions + 1):
        batch = workload.batch(f"{name}/{repetition}")
        for side, worker in sides.items():
            rate = tokens_per_second(side, worker, workload, batch)
            print(f"  {name} {side}: {rate:.1f} tok/s{'' if repetition else ' (warm-up)'}", flush=True)
            if repetition:
                rates[side].append(rate)
    return rates


def tokens_per_second(side: str, worker: peers.Worker, workload: Workload, batch: Mapping[str, Any]) -> float:
    """The rate at which one side answers one batch."""
    answer = worker.ask(batch, timeout_s=BATCH_TIMEOUT_S)
    if answer["tokens"] != workload.tokens:
        raise peers.PeerError(f"{side}: drew {answer['tokens']} tokens instead of {workload.tokens}")
    return float(answer["tokens"] / answer["seconds"])


def make_row(
    row: str,
    workload: Workload,
    rates: Mapping[str, Sequence[float]],
    weights: Mapping[str, int],
    bounds: Limits,
    details: Mapping[str, Any],
) -> Row:
    """A row from what all sides did: headrace in the row's format against the best of its peers."""
    _, weight_format = split(row)
    dtypes = FORMATS[weight_format].peer_dtypes
    candidates = {
        side: median(rates[side]) for side in rates if any(side.startswith(f"vLLM {d} ") for d in dtypes)
    }
    peer_name = max(candidates, key=lambda side: candidates[side])
    limit, limit_name = physical_limit(workload, weights, bounds, weight_format)
    return report.against(
        f"{workload.what}, {weight_format}",
        "tok/s",
        headrace=median(rates[ours(weight_format)]),
        peer=candidates[peer_name],
        peer_name=peer_name,
        target=TARGETS[row],
        limit=limit,
        limit_name=limit_name,
        details={
            **details,
            "lengths": list(workload.lengths),
            "tokens_per_second": {side: report.summary(values) for side, values in rates.items()},
        },
    )


def physical_limit(
    workload: Workload, weights: Mapping[str, int], bounds: Limits, weight_format: str
) -> tuple[float, str]:
    """Tokens per second that no engine can pass, and what holds it back.

    Every distinct prompt token and every new token but a sample's last goes through the layers once (two operations per
    weight), every new token comes out of the head; and one forward at least reads every weight for each token
    of the longest sample. Attention, sampling and KV are taken to be free.
    """
    layer_tokens = workload.prompts * PROMPT_TOKENS + workload.tokens - len(workload.lengths)
    operations = 2 * (weights["layers"] * layer_tokens + weights["head"] * workload.tokens)
    read = (weights["layers"] + weights["head"]) * FORMATS[weight_format].weight_bytes * max(workload.lengths)
    peak = bounds.gemm_int8 if weight_format == "int8" else bounds.gemm
    seconds, name = max((operations / peak, "GEMM peak"), (read / bounds.bandwidth, "memory bandwidth"))
    return workload.tokens / seconds, f"{name}, {weight_format}"


def ours(weight_format: str) -> str:
    """headrace's name among the sides."""
    return f"headrace {weight_format}"


def theirs(dtype: str, eager: bool) -> str:
    """vLLM's name among the sides."""
    return f"vLLM {dtype} {'eager' if eager else 'compiled'}"


def start_headrace(weight_format: str) -> peers.Worker:
    """headrace as a process of its own."""
    engine = {"max_sequences": MAX_SEQUENCES, "context_length": CONTEXT} | FORMATS[weight_format].engine
    return peers.Worker(
        ours(weight_format),
        [sys.executable, str(peers.SCRIPTS / "headrace_generate.py")],
        {"model": MODEL, "engine": engine},
        start_timeout_s=START_TIMEOUT_S,
        environment={"OMP_NUM_THREADS": str(report.cores())},
    )


def start_vllm(dtype: str, eager: bool) -> peers.Worker:
    """vLLM as a process of its own, set up as its own documentation has it for a CPU."""
    from headrace import models

    python = peers.ensure_venv("vllm")
    return peers.Worker(
        theirs(dtype, eager),
        [str(python), str(peers.SCRIPTS / "vllm_generate.py")],
        {
            "model": str(models.resolve(MODEL)),
            "dtype": dtype,
            "eager": eager,
            "block_size": VLLM_BLOCK_TOKENS,
            "max_model_len": CONTEXT,
            "max_sequences": MAX_SEQUENCES,
        },
        start_timeout_s=START_TIMEOUT_S,
        environment=vllm_environment(),
    )


def vllm_environment() -> dict[str, str]:
    """What vLLM needs to be fast on a CPU.

    Raises:
        PeerError: the allocator that it needs is not installed.
    """
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    if tcmalloc is None:
        raise peers.PeerError("vLLM needs tcmalloc to be fast; install Debian's package libtcmalloc-minimal4")
    folder = peers.BENCHMARKS / "venvs" / "vllm"
    return {
        "LD_PRELOAD": f"{tcmalloc}:{folder / 'lib' / 'libiomp5.so'}",
        "OMP_NUM_THREADS": str(report.cores()),
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, report.core_numbers())),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def transformers(workload: Workload) -> dict[str, Any]:
    """transformers' `generate` on one batch, once, after a short warm-up."""
    from headrace import models

    python = peers.ensure_venv("trl")
    settings = {"model": str(models.resolve(MODEL)), "threads": report.cores()}
    batch = workload.batch("transformers")
    with peers.Worker(
        "transformers",
        [str(python), str(peers.SCRIPTS / "transformers_generate.py")],
        settings,
        start_timeout_s=START_TIMEOUT_S,
        environment={"OMP_NUM_THREADS": str(report.cores()), "HF_HUB_OFFLINE": "1"},
    ) as worker:
        worker.ask({"prompts": batch["prompts"], "max_tokens": [4]}, timeout_s=BATCH_TIMEOUT_S)
        rate = tokens_per_second("transformers", worker, workload, batch)
    print(f"  generate_64 transformers float32: {rate:.1f} tok/s", flush=True)
    return {"tokens_per_second": rate, "versions": peers.versions(python, ["transformers", "torch"])}


def versions() -> dict[str, dict[str, str]]:
    """Both sides' packages."""
    return {
        "headrace": peers.versions(Path(sys.executable), ["headrace", "torch", "transformers"]),
        "vllm": peers.versions(peers.ensure_venv("vllm"), ["vllm-cpu", "torch", "transformers"]),
    }
