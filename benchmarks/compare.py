"""Whether this checkout is slower than another one: `python -m benchmarks.compare OTHER_CHECKOUT [ROW ...]`.

Both are measured on this machine, in this environment, in turn: a pair is one measurement of each, with the order
changing from pair to pair. The ratio of a pair is how many times as fast this checkout is as the other; the median of
all pairs' ratios is judged (`paired.py`).

Invariants
* Every measurement is a process of its own, which imports `src/headrace` of its checkout and is asked through that
  checkout's own `benchmarks/peer_scripts`: only requests and answers have to be the same in both.
* Both sides of a pair do the same work: the same prompts, lengths and settings.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import generation, kv, paired, peers, publish, report, runs, start, suite, training

REPEATS = 3
"""Within a process, after a warm-up; the median counts."""

SMALL_STEPS = ("line.groups_per_step=2", "algorithm.group_size=2", "sampling.max_tokens=8")
"""Steps that are short and publish all weights even so."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder with the whole project."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return runs.threads() | {"PYTHONPATH": str(self.folder / "src")}

    @property
    def addition(self) -> Path:
        return self.folder / "examples" / "addition.toml"

    def check(self) -> None:
        """Raise a PeerError unless processes import headrace from here."""
        code = "import headrace; print(headrace.__file__)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if not Path(done.stdout.strip()).is_relative_to(self.folder / "src"):
            raise peers.PeerError(
                f"{self.folder} is no checkout of headrace: it has no src/headrace to import"
            )

    def worker(self, script: str, settings: dict[str, Any]) -> peers.Worker:
        command = [sys.executable, str(self.folder / "benchmarks" / "peer_scripts" / script)]
        name, limit = f"{script} of {self.folder.name}", generation.START_TIMEOUT_S
        return peers.Worker(name, command, settings, start_timeout_s=limit, environment=self.environment)


# What is measured: each returns seconds


def generate(name: str, checkout: Checkout) -> float:
    """A batch of a workload, in float32."""
    workload = generation.WORKLOADS[name]
    engine = {"max_sequences": generation.MAX_SEQUENCES, "context_length": generation.CONTEXT}
    with checkout.worker("headrace_generate.py", {"model": generation.MODEL, "engine": engine}) as worker:
        rates = [
            generation.tokens_per_second(worker.name, worker, workload, workload.batch(f"{name}/{repeat}"))
            for repeat in range(REPEATS + 1)
        ]
    return workload.tokens / median(rates[1:])


def gradient(checkout: Checkout) -> float:
    """The gradient of a step, of answers of one length."""
    settings = {"config": str(checkout.addition), "overrides": []}
    with checkout.worker("headrace_gradient.py", settings) as worker:
        shape = training.SHAPES["training"] | {"forced": True}
        worker.ask({"do": "sample", "shape": "training"} | shape, timeout_s=training.TIMEOUT_S)
        request = {"do": "gradient", "shape": "training"}
        seconds = [worker.ask(request, timeout_s=training.TIMEOUT_S)["seconds"] for _ in range(REPEATS + 1)]
    return float(median(seconds[1:]))


def publishing(checkout: Checkout) -> float:
    """The publish of a step, packing included."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        metrics = runs.train(
            checkout.addition,
            Path(scratch) / "run",
            steps=publish.STEPS,
            overrides=SMALL_STEPS,
            what=f"a run of {checkout.folder.name}",
            environment=checkout.environment,
        )
    return float(median(step["time_publish_s"] for step in metrics[publish.WARM_UP :]))


def starting(checkout: Checkout) -> float:
    """From the start of the process to the first token of a tiny model."""
    return start.time_to_first_token(checkout.addition, ["model.name=tiny-random"], checkout.environment)


def kv_host(checkout: Checkout) -> float:
    """A prefix from host memory."""
    engine = kv.ENGINE | {"kv_host_mb": 1024}
    settings = {
        "model": generation.MODEL,
        "shared_name": f"bench-{uuid.uuid4().hex[:8]}",
        "engine": engine,
    }
    ids = list(range(1000, 1000 + kv.PREFIX))
    with checkout.worker("headrace_kv.py", settings) as worker:
        worker.ask({"do": "prefill", "ids": ids}, timeout_s=kv.LIMIT_S)
        worker.ask({"do": "move", "ids": ids, "source": "device", "target": "host"}, timeout_s=kv.LIMIT_S)
        answer = worker.ask({"do": "restore", "ids": ids, "times": 5 * kv.TIMES}, timeout_s=kv.LIMIT_S)
    if min(answer["tokens"]) < kv.PREFIX:
        raise peers.PeerError(f"{worker.name}: a restore gave {min(answer['tokens'])} tokens")
    return float(median(answer["seconds"][1:]))


MEASURES: dict[str, Callable[[Checkout], float]] = {
    "generate_8": partial(generate, "generate_8"),
    "generate_64": partial(generate, "generate_64"),
    "rollouts": partial(generate, "rollouts"),
    "training": gradient,
    "publish": publishing,
    "start": starting,
    "kv_host": kv_host,
}


def compare(name: str, this: Checkout, other: Checkout, pairs: int) -> list[float]:
    """The ratio of each pair: the other's seconds over this one's."""
    ratios = []
    for pair in range(pairs):
        order = (other, this) if pair % 2 == 0 else (this, other)
        seconds = {side: MEASURES[name](side) for side in order}
        ratios.append(seconds[other] / seconds[this])
        print(f"{name} pair {pair + 1}: {seconds[this]:.4g} s, other {seconds[other]:.4g} s", flush=True)
    return ratios


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print one line per row. Returns the exit code: 1 if a row is below."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(MEASURES)}; all by default")
    parser.add_argument("--pairs", type=int, default=paired.PAIRS, help=f"per row, {paired.PAIRS} by default")
    given = parser.parse_args(arguments)
    rows = given.rows or list(MEASURES)
    if unknown := [name for name in rows if name not in MEASURES]:
        parser.error(f"there is no row {unknown[0]}; there are {', '.join(MEASURES)}")
    if given.pairs < 1:
        parser.error("--pairs must be 1 or more")
    this, other = Checkout(peers.BENCHMARKS.parent), Checkout(given.other.resolve())
    if (busy := report.busy_cores()) > suite.BUSY_CORES:
        print(f"warning: other processes use {busy:.1f} cores; nothing can be judged beside them", flush=True)
    lines = []
    try:
        for side in (this, other):
            side.check()
            starting(side)  # warms the caches of files and kernels
        for name in rows:
            ratios = compare(name, this, other, given.pairs)
            low, high, confidence = paired.interval(ratios)
            span = f"[{low:.3f}, {high:.3f}] ({confidence:.1%})"
            lines.append(f"{name:12} {median(ratios):.3f} {span:26} {paired.verdict(ratios)}")
    except peers.PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        print(*lines, sep="\n")
    return int(any(line.endswith("below") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
