"""Rows `damage` and `damage_resumes`: state that is damaged on purpose, again and again.

`damage`: KV blocks on disk, weights in shared memory, journals and checkpoints get flipped bits, missing and foreign
bytes, full and read-only disks; each must be detected, or what comes out must be what comes out of undamaged state.
`damage_resumes`: a run is killed, its files are damaged, and it is resumed; nothing may be lost without a word.
"""

from __future__ import annotations

import collections
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import peers, report, runs
from headrace.state.journal import Journal, Stored

ROWS = ("damage", "damage_resumes")
CASES = {"disk": 140, "segment": 120, "journal": 120, "checkpoint": 120}
SETTINGS = ("line.steps=24", "line.checkpoint_every=4", "line.decode_steps=4")
KILLED_AFTER_STEP = 10
LIMIT_S = 300.0

RESUMES = (
    ("journal.sqlite", "flip"),
    ("journal.sqlite", "cut"),
    ("journal.sqlite", "delete"),
    ("journal.sqlite-wal", "flip"),
    ("journal.sqlite-wal", "cut"),
    ("journal.sqlite-wal", "delete"),
    ("checkpoints/last/model.safetensors", "flip"),
    ("checkpoints/last/line.json", "cut"),
    ("checkpoints/last/manifest.json", "delete"),
    ("checkpoints/last", "delete"),
    ("metrics.jsonl", "cut"),
    ("tokens_generated", "delete"),
)
"""What is damaged before a resume, and how."""


def measure(rows: Sequence[str]) -> dict[str, report.Row]:
    """The rows asked for.

    Raises:
        PeerError: a process ended or fell silent.
    """
    found: dict[str, report.Row] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch)
        config = runs.small_config(folder)
        if "damage" in rows:
            runs.train(config, folder / "run", steps=8, overrides=("line.checkpoint_every=4",), what="damage")
            found["damage"] = _row(
                "damaged KV blocks, weights, journals and checkpoints: found, or without effect",
                _cases(folder / "run"),
            )
        if "damage_resumes" in rows:
            found["damage_resumes"] = _row(
                "killed and damaged runs: resumed, or refused with a reason, nothing lost without a word",
                {"resume": list(_resumes(config, folder))},
            )
    return found


def _row(what: str, cases: Mapping[str, Sequence[Sequence[str]]]) -> report.Row:
    everything = [outcome for listed in cases.values() for _, outcome in listed]
    counts = {
        name: dict(collections.Counter(f"{how}: {outcome}" for how, outcome in listed))
        for name, listed in cases.items()
    }
    good = sum(outcome in ("detected", "harmless") for outcome in everything)
    return report.within(
        f"{len(everything)} {what}",
        "share",
        headrace=good / len(everything),
        target=1.0,
        better="higher",
        details={"cases": len(everything), "outcomes": dict(collections.Counter(everything)), "by": counts},
    )


def _cases(run: Path) -> dict[str, list[list[str]]]:
    command = [sys.executable, str(peers.BENCHMARKS / "peer_scripts" / "headrace_damage.py")]
    with peers.Worker("damage", command, {"run": str(run)}, start_timeout_s=LIMIT_S) as worker:
        return {
            what: worker.ask({"what": what, "count": count, "seed": 0}, timeout_s=LIMIT_S)["cases"]
            for what, count in CASES.items()
        }


def _resumes(config: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Each as (damage, outcome)."""
    rng = random.Random(0)
    killed = folder / "killed"
    _kill(config, killed)
    before = _records(killed)
    whole = folder / "whole"
    shutil.copytree(killed, whole)
    lost = _lost(_resume(whole)[1])
    for number, (name, how) in enumerate(RESUMES):
        run = folder / f"case-{number}"
        shutil.copytree(killed, run)
        last = max((run / "checkpoints").iterdir(), key=lambda path: path.name)
        _damage(rng, run / name.replace("checkpoints/last", f"checkpoints/{last.name}"), how)
        yield f"{name} {how}", _judge(run, before, lost)


def _kill(config: Path, run: Path) -> None:
    command = [runs.program(), "train", str(config), "--run-dir", str(run)]
    for override in ("eval.tasks=0", *SETTINGS):
        command += ["--set", override]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT_S
        metrics = run / "metrics.jsonl"
        while (
            not metrics.exists() or len(metrics.read_text(encoding="utf-8").splitlines()) < KILLED_AFTER_STEP
        ):
            if process.poll() is not None or time.monotonic() > deadline:
                raise peers.PeerError("the run that was to be killed came to no step")
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _records(run: Path) -> list[Stored]:
    journal = Journal.open(run / "journal.sqlite", read_only=True)
    try:
        return list(journal.read())
    finally:
        journal.close()


def _damage(rng: random.Random, path: Path, how: str) -> None:
    if how == "delete":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if how == "cut":
        del data[at:]
    else:
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _judge(run: Path, before: Sequence[Stored], lost: int) -> str:
    """How a damaged run goes on.

    Args:
        before: the records that it had.
        lost: tokens that it loses without damage, those of the unit that was interrupted.

    Returns:
        `detected` if the program says what is wrong or counts what is lost, `harmless` if nothing is.
    """
    code, said = _resume(run)
    if code:
        return "detected" if "error: " in said and "Traceback" not in said else f"wrong: {said[-300:]}"
    told = ("is damaged", "does not hold", "is missing", "are missing", "is not readable")
    if any(words in said for words in told) or _lost(said) > lost:
        return "detected"
    kept = _records(run)[: len(before)] == list(before)
    return "harmless" if kept and _lost(said) == lost else f"wrong: {said[-300:]}"


def _resume(run: Path) -> tuple[int, str]:
    """Exit code and all that was said."""
    done = subprocess.run(
        [runs.program(), "train", "--resume", str(run)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _lost(said: str) -> int:
    found = re.search(r"(\d+) tokens that were sampled after the journal's last event are lost", said)
    return int(found[1]) if found else 0
