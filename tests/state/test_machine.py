"""What the machine lets this process have."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.state import machine


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", 1 << 30),
        ("", 1 << 30),
    ],
)
def test_a_containers_quota(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert machine._quota_cores(tmp_path / "cpu.max") == cores
    assert machine._quota_cores(tmp_path / "missing") == 1 << 30


def test_available_cores_are_at_least_one_and_at_most_all() -> None:
    assert 1 <= machine.available_cores() <= len(machine.core_numbers())


def test_own_work_is_not_counted_as_others() -> None:
    """Another process's work is seen, and this one's is not taken for it."""
    before = machine.cpu_seconds_of_others()
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 20
        while machine.cpu_seconds_of_others() - before < 0.3:
            assert time.monotonic() < deadline, "a busy neighbour was not seen"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(5)
