"""Rows of looking at long runs: a written run is one that a line could have recorded."""

import sys
from pathlib import Path

import pytest

from benchmarks import history, peers
from headrace.runs.folder import RunFolder
from headrace.runs.reading import read_history
from headrace.schedule import Bucket


def test_a_written_run_folds_and_has_its_tokens(tmp_path: Path):
    script = str(peers.SCRIPTS / "headrace_history.py")
    peers.run([sys.executable, script, str(tmp_path / "run"), "3"], what="a run", timeout_s=60)
    with RunFolder.open(tmp_path / "run", read_only=True) as folder:
        found, light = read_history(folder), read_history(folder, light=True)
    assert found.accounted == 3 * 64 * 23
    assert [one.tokens for one in found.attempts.values()] == [23] * (3 * 64)
    assert {one.bucket for one in found.attempts.values()} == {Bucket.TRAINED}
    assert list(light.steps) == [1, 2, 3]
    assert light.steps == found.steps


def test_reading_is_timed_without_imports_and_its_memory_with_them():
    read, imports = [(3.5, 200.0), (2.5, 250.0), (9.5, 210.0)], [(1.5, 60.0), (0.5, 60.0), (1.0, 60.0)]
    rows = history.rows_of("history_long", read, imports, 2**20)
    assert set(rows) == {"history_long", "history_memory"}
    assert rows["history_long"].headrace == pytest.approx(2.5)
    assert rows["history_memory"].headrace == pytest.approx(210)
    assert all(row.met for row in rows.values())
    (row,) = history.rows_of("history", read, imports, 2**20).values()
    assert not row.met


def test_a_run_is_written_read_and_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(history, "STEPS", {"history": 2, "history_long": 4})
    monkeypatch.setattr(history, "TURNS", 1)
    rows = history.measure(["history_memory"])
    assert set(rows) == {"history_memory"}
    assert 20 < rows["history_memory"].headrace < 300
    assert not list(tmp_path.iterdir())
