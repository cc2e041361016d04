"""Rows `kv_*`: KV that is found instead of computed.

`kv_host`, `kv_disk` and `kv_process` restore a prefix of 2,048 tokens into a slot from host memory, from disk with a
warm page cache (cold is in the details) and from another process, each against prefilling it. `kv_move` is a
move's bandwidth against a plain copy's. `kv_conversation` and `kv_conversation_hits` are eight-turn conversations, of
which the device holds a third, against the same without a cache.
"""

from __future__ import annotations

import random
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from statistics import median
from typing import Any

from benchmarks import peers, report, runs

ROWS = ("kv_host", "kv_disk", "kv_process", "kv_move", "kv_conversation", "kv_conversation_hits")
TARGETS = {
    "kv_host": 80.0,
    "kv_disk": 25.0,
    "kv_process": 60.0,
    "kv_move": 0.5,
    "kv_conversation": 3.0,
    "kv_conversation_hits": 0.9,
}
PREFIX = 2048
PREFIXES = 3
TIMES = 7
CONVERSATION = {"sessions": 12, "turns": 8, "first": 400, "answer": 100, "sampled": 32}
DEVICE_MB = 256
"""A third of what the conversations' KV takes at their end."""
LIMIT_S = 300.0

ENGINE = {"context_length": 2304, "max_sequences": 4, "prefix_cache_mb": 1024}


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """All rows in one session.

    Raises:
        PeerError: a process ended or fell silent.
    """
    found: dict[str, report.Row] = {}
    if set(rows) - {"kv_conversation", "kv_conversation_hits"}:
        found |= _prefix_rows()
    if set(rows) & {"kv_conversation", "kv_conversation_hits"}:
        found |= _conversation_rows()
    return {name: found[name] for name in rows}


@contextmanager
def _side(folder: str, shared_name: str, **engine: Any) -> Iterator[peers.Worker]:
    settings = {
        "model": "smollm2-135m",
        "shared_name": shared_name,
        "engine": ENGINE | {"kv_disk_folder": folder} | engine,
    }
    command = [sys.executable, str(peers.BENCHMARKS / "peer_scripts" / "headrace_kv.py")]
    with peers.Worker(
        "headrace", command, settings, start_timeout_s=LIMIT_S, environment=runs.threads()
    ) as side:
        yield side


def _prefix_rows() -> dict[str, report.Row]:
    rng = random.Random(0)
    name = f"bench-{uuid.uuid4().hex[:8]}"
    prefixes = [[rng.randrange(1000, 20000) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    single: dict[str, list[float]] = {
        key: [] for key in ("prefill", "host", "process", "disk", "cold", "out")
    }
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, ExitStack() as stack:
        tiers = {"kv_host_mb": 1024, "kv_disk_mb": 2048}
        side, other = (stack.enter_context(_side(folder, name, **tiers)) for _ in range(2))

        def ask(whom: peers.Worker, do: str, **request: Any) -> dict[str, Any]:
            return whom.ask({"do": do} | request, timeout_s=LIMIT_S)

        def restored(whom: peers.Worker, ids: list[int], times: int = TIMES) -> list[float]:
            answer = ask(whom, "restore", ids=ids, times=times)
            if min(answer["tokens"]) < PREFIX:
                raise peers.PeerError(f"a restore gave {min(answer['tokens'])} tokens instead of {PREFIX}")
            return [float(seconds) for seconds in answer["seconds"]]

        ask(side, "prefill", ids=[rng.randrange(1000, 20000) for _ in range(PREFIX)])
        ask(side, "forget", tiers=["device"])
        for ids in prefixes:
            single["prefill"].append(ask(side, "prefill", ids=ids)["seconds"])
            moved = ask(side, "move", ids=ids, source="device", target="host")
            single["out"].append(moved["bytes"] / moved["seconds"])
            # The first time is the warm-up: pages of the slot are touched.
            single["host"] += restored(side, ids)[1:]
            single["process"] += restored(other, ids)[1:]
            ask(side, "move", ids=ids, source="host", target="disk")
            ask(side, "forget", tiers=["device", "host"], cold=True)
            single["cold"] += restored(side, ids, 1)
            single["disk"] += restored(side, ids)[1:]
        size = moved["bytes"]
        copies = ask(side, "copy", bytes=size, times=TIMES)["seconds"][1:]
    prefill = median(single["prefill"])
    details = single | {"copy": copies, "bytes": size, "prefix": PREFIX}
    found = {
        row: report.against(
            f"a {PREFIX}-token prefix {what}",
            "s",
            headrace=median(single[key]),
            peer=prefill,
            peer_name="prefilling it",
            target=TARGETS[row],
            better="lower",
            limit=median(copies),
            limit_name="a plain copy",
            details=details,
        )
        for row, key, what in (
            ("kv_host", "host", "from shared host memory"),
            ("kv_disk", "disk", "from disk, warm page cache"),
            ("kv_process", "process", "from another process"),
        )
    }
    bandwidth = size / median(single["process"])
    found["kv_move"] = report.against(
        "bandwidth of KV from another process",
        "B/s",
        headrace=bandwidth,
        peer=size / median(copies),
        peer_name="a plain copy of as many bytes",
        target=TARGETS["kv_move"],
        details=details,
    )
    return found


def _conversation_rows() -> dict[str, report.Row]:
    answers = {}
    for name, engine in (
        ("kept", {"prefix_cache_mb": DEVICE_MB, "kv_host_mb": 2048, "kv_disk_mb": 2048}),
        ("computed", {"prefix_cache_mb": 0}),
    ):
        with (
            tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder,
            _side(folder, f"bench-{uuid.uuid4().hex[:8]}", **engine) as side,
        ):
            answers[name] = side.ask({"do": "converse"} | CONVERSATION, timeout_s=2 * LIMIT_S)
    return conversation_rows(answers)


def conversation_rows(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, report.Row]:
    """The rows of two plays of the same conversations, turns after the first counted."""
    kept, computed = (
        median(chain.from_iterable(answers[name]["first_token_s"][1:])) for name in ("kept", "computed")
    )
    details = {name: dict(answer) for name, answer in answers.items()} | dict(CONVERSATION)
    return {
        "kv_conversation": report.against(
            "first token of a later turn, device holds a third of the sessions",
            "s",
            headrace=kept,
            peer=computed,
            peer_name="computing it again",
            target=TARGETS["kv_conversation"],
            better="lower",
            details=details,
        ),
        "kv_conversation_hits": report.within(
            "tokens of earlier turns that were found",
            "share",
            headrace=answers["kept"]["found"] / answers["kept"]["asked"],
            target=TARGETS["kv_conversation_hits"],
            better="higher",
            details=details,
        ),
    }
