"""Rows `publish_apart`, `publish_apart_memory` and `prefill_apart`: engines in two processes.

`publish_apart`: how long decoding stops when another process publishes weights. `publish_apart_memory`: how many
versions of the weights the follower's memory grows by over its publishes, beside the one that it began with.
`prefill_apart`: the 99th percentile of the time between two tokens under a stream of long prompts, of an engine whose
prompts another process prefills on one of the two cores, against one engine with chunked prefill on both.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks import peers, report, runs

ROWS = ("publish_apart", "publish_apart_memory", "prefill_apart")
SCRIPT = peers.BENCHMARKS / "peer_scripts" / "headrace_two.py"
STOP_LIMIT_S = 0.005
PUBLISHES = 5
VERSION_MB = 134_515_008 * 4 / 2**20
"""SmolLM2-135M in float32."""

ENGINE = {"max_sequences": 12, "context_length": 1280, "prefix_cache_mb": 0}
STREAM = {"sequences": 8, "tokens": 250, "prompt": 1024, "every_s": 1.5, "seed": 0}
CHUNKS = (64, 256, 512)
LIMIT_S = 300.0


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """The rows asked for.

    Raises:
        PeerError: a process ended or fell silent.
    """
    found: dict[str, report.Row] = {}
    if {"publish_apart", "publish_apart_memory"} & set(rows):
        found |= publish_rows(_publishes())
    if "prefill_apart" in rows:
        found |= prefill_rows(_streams())
    return {name: found[name] for name in rows}


def _worker(settings: Mapping[str, Any]) -> peers.Worker:
    command = [sys.executable, str(SCRIPT)]
    return peers.Worker(
        str(settings["part"]), command, settings, start_timeout_s=LIMIT_S, environment=runs.threads()
    )


def _publishes() -> dict[str, Any]:
    store = f"bench-{uuid.uuid4().hex[:8]}"
    answers = []
    published = []
    with (
        _worker({"part": "publisher", "store": store}) as publisher,
        _worker({"part": "follower", "store": store}) as follower,
    ):
        answers.append(follower.ask({"version": 0, "steps": 150}, timeout_s=LIMIT_S))
        for version in range(1, PUBLISHES + 1):
            published.append(publisher.ask({}, timeout_s=LIMIT_S)["seconds"])
            answers.append(follower.ask({"version": version, "steps": 20}, timeout_s=LIMIT_S))
    return {"publish_s": published, "follower": answers}


def publish_rows(measured: Mapping[str, Any]) -> dict[str, report.Row]:
    """The rows of one session."""
    answers = measured["follower"]
    stopped = [seconds for answer in answers for seconds in answer["stopped"]]
    # The first answer precedes the first publish.
    before, *during = (answer["memory_mb"] for answer in answers)
    details = {
        "stopped_s": stopped,
        "step_after_s": [seconds for answer in answers for seconds in answer["after"]],
        "publish_s": measured["publish_s"],
        "pack_s": [answer["pack_s"] for answer in answers[1:]],
        "memory_before_mb": before[-1],
        "memory_most_mb": [max(memory) for memory in during],
        "memory_least_mb": [min(memory) for memory in during],
        "step_s": median(seconds for answer in answers for seconds in answer["steps"]),
        "longest_step_s": max(seconds for answer in answers for seconds in answer["steps"]),
    }
    return {
        "publish_apart": report.within(
            "decoding stops for a publish of another process, the longest",
            "s",
            headrace=max(stopped),
            target=STOP_LIMIT_S,
            details=details,
        ),
        "publish_apart_memory": report.within(
            f"the follower's memory grows over {len(during)} publishes, packed and shared weights together",
            "versions",
            # From one version to two: in shared memory, and packed.
            headrace=(max(map(max, during)) - before[-1]) / VERSION_MB,
            target=2.1,
            details=details,
        ),
    }


def _streams() -> dict[str, Any]:
    measured: dict[str, Any] = {}
    for chunk in CHUNKS:
        with _worker(
            {"part": "stream", "apart": False, "engine": ENGINE | {"max_batch_tokens": chunk}}
        ) as one:
            one.ask(STREAM | {"tokens": 20}, timeout_s=LIMIT_S)
            measured[f"chunks of {chunk}"] = one.ask(STREAM, timeout_s=LIMIT_S)
    with _worker({"part": "stream", "apart": True, "engine": ENGINE | {"max_batch_tokens": 512}}) as two:
        two.ask(STREAM | {"tokens": 20}, timeout_s=LIMIT_S)
        measured["apart"] = two.ask(STREAM, timeout_s=LIMIT_S)
    return measured


def prefill_rows(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, report.Row]:
    """The row of some streams; the best chunk size of the single engine counts."""
    p99 = {name: quantiles(stream["gaps"], n=100)[98] for name, stream in measured.items()}
    best = min((name for name in p99 if name != "apart"), key=lambda name: p99[name])
    summary = {
        name: {
            "p99_s": p99[name],
            "median_s": median(stream["gaps"]),
            "prompts": stream["prompts"],
            "seconds": stream["seconds"],
            "drained_s": stream["drained_s"],
        }
        for name, stream in measured.items()
    }
    return {
        "prefill_apart": report.against(
            f"99th percentile between two tokens, {STREAM['prompt']}-token prompts coming in",
            "s",
            headrace=p99["apart"],
            peer=p99[best],
            peer_name=f"one engine, {best}",
            target=2.0,
            better="lower",
            limit=summary["apart"]["median_s"],
            limit_name="its median: undisturbed, but on one core of two",
            details=summary | dict(STREAM),
        )
    }
