"""Rows `agreement_mean`, `agreement_max`: engine and trainer about log-probs of the same tokens and weights, float32.

More than 10,000 tokens are sampled under everything that could make a difference: cached prefixes, prompts prefilled in
pieces, preemption, and weights that change in the middle of answers.

Invariant: a result counts only if each of these has happened, and as many tokens were compared as were asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import peers, report, runs

ROWS = ("agreement_mean", "agreement_max")
TARGETS = {"agreement_mean": 1e-5, "agreement_max": 1e-3}

MODEL = "smollm2-135m"
REQUEST: dict[str, Any] = {
    # Room for about 800 tokens of KV: half of what sixteen sequences need.
    "engine": {
        "max_sequences": 16,
        "context_length": 256,
        "max_batch_tokens": 32,
        "kv_memory_mb": 36,
        "prefix_cache_mb": 64,
    },
    "groups": 18,
    "samples": 8,
    "max_tokens": 80,
    "switches": 3,
    "learning_rate": 1e-5,
}
COVERED = ("prefix_hit_tokens", "chunked_prompts", "preemptions")
TIMEOUT_S = 1800.0


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """Both rows come out of one comparison.

    Raises:
        PeerError: it did not finish, or did not cover what it should.
    """
    result = compare(MODEL, REQUEST)
    details = {"request": REQUEST, "result": result}
    found = {}
    for name in rows:
        which = name.removeprefix("agreement_")
        found[name] = report.within(
            f"log-prob difference of trainer and generator, {which} of {result['tokens']} tokens",
            "nat",
            headrace=result[which],
            target=TARGETS[name],
            details=details,
        )
    return found


def compare(model: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the comparison in a process of its own and check that it covered everything."""
    command = [sys.executable, str(peers.SCRIPTS / "headrace_agreement.py")]
    with peers.Worker(
        "agreement", command, {"model": model}, start_timeout_s=TIMEOUT_S, environment=runs.threads()
    ) as worker:
        result = worker.ask(request, timeout_s=TIMEOUT_S)
    check(result, request)
    return result


def check(result: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Raise a PeerError unless everything that could make a difference took part."""
    wanted = request["groups"] * request["samples"] * request["max_tokens"]
    if result["tokens"] != wanted:
        raise peers.PeerError(f"agreement: {result['tokens']} tokens were compared instead of {wanted}")
    missing = [name for name in COVERED if not result[name]]
    if result["switches_in_flight"] != request["switches"]:
        missing.append("switches_in_flight")
    if missing:
        raise peers.PeerError(f"agreement: {', '.join(missing)} did not take part; change the request")
