"""`headrace train` as a measured process, and the peak memory of a process tree."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peers, runs

HOLD = """
import subprocess, sys, time
held = b"x" * (int(sys.argv[1]) << 20)
if len(sys.argv) > 2:
    subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[3]], check=True)
time.sleep(1)
"""


def test_peak_memory_is_that_of_the_process_and_its_children_together():
    with runs.PeakMemory() as memory:
        subprocess.run([sys.executable, "-c", HOLD, "60", HOLD, "80"], check=True)
    assert 140 < memory.megabytes < 260


def test_a_peak_counts_also_when_it_is_over():
    code = "import time; held = b'x' * (200 << 20); del held; time.sleep(1)"
    with runs.PeakMemory() as memory:
        subprocess.run([sys.executable, "-c", code], check=True)
    assert memory.megabytes > 200


def test_processes_that_ran_before_are_left_out():
    earlier = subprocess.Popen([sys.executable, "-c", HOLD.replace("sleep(1)", "sleep(60)"), "300"])
    try:
        deadline = time.monotonic() + 30
        while runs.peak_mb(earlier.pid) < 300 and time.monotonic() < deadline:
            time.sleep(0.05)
        with runs.PeakMemory() as memory:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)
    finally:
        earlier.kill()
        earlier.wait(10)
    assert 0 < memory.megabytes < 100


def test_a_process_that_has_ended_has_no_peak():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    assert runs.peak_mb(process.pid) == 0.0


def test_a_failed_run_is_one_line(tmp_path: Path):
    with pytest.raises(peers.PeerError, match="broken: ended with exit code"):
        runs.train(runs.ADDITION, tmp_path / "run", steps=1, overrides=["line.unknown=1"], what="broken")


def test_totals_are_over_steps_and_names(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"a": i, "b": 10 * i}) + "\n" for i in (1, 2)), encoding="utf-8")
    assert runs.total(runs.read_lines(path), "a", "b") == 33.0
