"""The journal gives back exactly what was committed, whoever reads it and however its writer died."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_cases import earlier_format

from headrace.errors import RunError, UserError
from headrace.state.journal import CHUNK_RECORDS, Journal, JournalDamaged

records = st.tuples(st.text(max_size=12), st.text(), st.binary(max_size=40))
Contents = list[tuple[int, str, str, bytes]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    opened = Journal.open(path)
    yield opened
    opened.close()


def contents(path: Path, after: int = 0) -> Contents:
    """Every record, read from another connection."""
    reader = Journal.open(path, read_only=True)
    try:
        return [(one.seq, one.kind, one.body.decode(), one.payload) for one in reader.read(after)]
    finally:
        reader.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(records, max_size=4), max_size=5))
def test_what_was_committed_comes_back(
    tmp_path_factory: pytest.TempPathFactory, units: list[list[tuple[str, str, bytes]]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    written: Contents = []
    for unit in units:
        journal = Journal.open(path)
        assert journal.last_seq == len(written)
        for one in unit:
            journal.record(*one)
        assert contents(path) == written, "it is seen before it is committed"
        written += [(len(written) + place, *one) for place, one in enumerate(unit, start=1)]
        assert journal.commit() == journal.last_seq == len(written)
        assert contents(path) == written
        for after in (len(written) // 2, len(written)):
            assert contents(path, after) == written[after:]
        with pytest.raises(JournalDamaged, match="it is missing"):
            contents(path, len(written) + 1)
        journal.close()
        assert not list(path.parent.glob("journal.sqlite-*"))


def test_a_record_needs_no_payload(journal: Journal, path: Path) -> None:
    journal.record("a", "{}")
    journal.commit()
    assert contents(path) == [(1, "a", "{}", b"")]


def test_what_no_file_can_hold_is_refused_alone(journal: Journal, path: Path) -> None:
    journal.record("a", "{}")
    with pytest.raises(UnicodeEncodeError):
        journal.record("b", "half a pair: \ud800")
    journal.record("c", "{}")
    assert journal.commit() == 2
    assert [kind for _, kind, _, _ in contents(path)] == ["a", "c"]


def test_some_kinds_only(journal: Journal) -> None:
    for number in range(3 * CHUNK_RECORDS):
        journal.record("tokens" if number % 3 else "step", str(number))
    journal.commit()
    assert [int(one.body) for one in journal.read(kinds={"step"})] == list(range(0, 3 * CHUNK_RECORDS, 3))
    assert len(list(journal.read(CHUNK_RECORDS + 1))) == 2 * CHUNK_RECORDS - 1


def test_a_record_of_several_kinds_is_one_of_each(journal: Journal) -> None:
    for kind in ("step", "tokens+world", "commit+step", "steps", "", "+"):
        journal.record(kind, "{}")
    journal.commit()
    assert [one.kind for one in journal.read(kinds={"step"})] == ["step", "commit+step"]
    assert [one.kind for one in journal.read(kinds=["world", "steps"])] == ["tokens+world", "steps"]
    assert list(journal.read(kinds=())) == []


def test_records_have_their_time(journal: Journal) -> None:
    journal.record("a", "{}")
    journal.record("b", "{}")
    journal.commit()
    first, second = journal.read()
    assert first.at <= second.at
    assert first.at == pytest.approx(time.time(), abs=60)


def test_a_mark_knows_the_journal_that_it_was_taken_from(journal: Journal, tmp_path: Path) -> None:
    others = [Journal.open(tmp_path / f"other-{i}") for i in range(2)]
    assert all(other.holds(journal.mark) for other in others)
    for number in range(5):
        for each in (journal, *others):
            # The second one is another course of records from the third on.
            each.record("a", str(9 if each is others[1] and number == 2 else number))
            each.commit()
    journal.record("b", "{}")
    mark = journal.mark
    assert mark.seq == 5  # what is not committed does not count
    journal.commit()
    assert journal.holds(mark)
    assert not journal.holds(mark._replace(seq=4))
    assert not others[1].holds(mark)
    assert not others[0].holds(journal.mark)  # it is shorter
    for each in others:
        each.close()


def test_closing_drops_what_was_not_committed(path: Path) -> None:
    journal = Journal.open(path)
    journal.record("a", "{}")
    journal.commit()
    journal.record("half a unit", "{}")
    journal.close()
    journal.close()
    assert [kind for _, kind, _, _ in contents(path)] == ["a"]


def test_readers_follow_a_writer_and_never_hold_it_up(journal: Journal, path: Path) -> None:
    for number in range(CHUNK_RECORDS + 10):
        journal.record("a", str(number))
    journal.commit()
    reader = Journal.open(path, read_only=True)
    reading = reader.read()
    next(reading)
    journal.record("late", "{}")
    journal.commit()
    assert [one.kind for one in reading][-1] == "late"
    assert reader.last_seq == journal.last_seq
    journal.close()  # while the reader is there
    assert reader.last_seq == CHUNK_RECORDS + 11
    reader.close()


def test_a_reader_writes_nothing(path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Journal.open(path, read_only=True)
    Journal.open(path).close()
    before = path.read_bytes()
    reader = Journal.open(path, read_only=True)
    with pytest.raises(RuntimeError, match="read only"):
        reader.record("a", "{}")
    reader.close()
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_second_writer_is_told(journal: Journal, path: Path) -> None:
    other = Journal.open(path)
    for writer in (journal, other):
        writer.record("a", "{}")
    journal.commit()
    with pytest.raises(RunError, match="another process writes to it too"):
        other.commit()
    other.close()
    assert len(contents(path)) == 1


# A full disk, a folder that is read-only


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(journal: Journal, path: Path) -> None:
    journal.record("a", "{}")
    journal.commit()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal.record("large", "x" * 50_000, b"x" * 50_000)
    journal.record("small", "{}")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
        with pytest.raises(RunError, match="disk") as caught:
            journal.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert not isinstance(caught.value, JournalDamaged)
    assert "\n" not in str(caught.value)
    assert [kind for _, kind, _, _ in contents(path)] == ["a"]
    # With room again, nothing that was recorded is missing.
    assert journal.commit() == 3
    assert [kind for _, kind, _, _ in contents(path)] == ["a", "large", "small"]


def test_a_database_that_may_not_grow(journal: Journal, path: Path) -> None:
    journal._connection.execute("PRAGMA max_page_count = 4")
    journal.record("large", "x" * 50_000, b"x" * 50_000)
    with pytest.raises(RunError, match="the disk is full; free some of it"):
        journal.commit()
    assert contents(path) == []


def test_a_read_only_file_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path)
    journal._connection.execute("PRAGMA query_only = ON")  # a folder's permissions do not bind every user
    journal.record("a", "{}")
    with pytest.raises(RunError, match="it is read-only; make it and its folder writable"):
        journal.commit()
    journal.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_journal_in_a_read_only_folder_can_be_read(path: Path) -> None:
    journal = Journal.open(path)
    journal.record("a", "{}")
    journal.commit()
    journal.close()
    path.parent.chmod(0o500)
    try:
        assert contents(path) == [(1, "a", "{}", b"")]
        with pytest.raises(RunError):
            Journal.open(path).commit()
    finally:
        path.parent.chmod(0o700)


# A writer that is killed

WRITERS = """
import os, sys
from headrace.state.journal import Journal

def write(path, report):
    journal = Journal.open(path)
    seq = journal.last_seq
    while True:
        for _ in range(1 + seq % 3):
            seq += 1
            journal.record("tokens", "x" * (seq * 7919 % 9000), seq.to_bytes(8, "little") * (seq % 900))
        seq += 1
        journal.record("end", "{}")
        journal.commit()
        os.pwrite(report, seq.to_bytes(8, "little"), 0)

report = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        write(sys.argv[1], report)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def test_kill_9_at_any_instant_loses_no_commit_and_halves_none(path: Path, tmp_path: Path) -> None:
    """Real writers are killed one after the other; each goes on from what the last one left."""
    rng = random.Random(4)
    report = tmp_path / "report"
    report.write_bytes(bytes(8))

    def reported() -> int:
        return int.from_bytes(report.read_bytes(), "little")

    command = [sys.executable, "-c", WRITERS, str(path), str(report)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for _ in range(30):
            before, deadline = reported(), time.monotonic() + 60
            writers.stdin.write(b"\n")
            pid = int(writers.stdout.readline())
            while reported() == before and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            assert writers.stdout.readline() == b"dead\n"
            found = contents(path)
            assert len(found) >= reported() > before
            assert found[-1][1] == "end", "half a transaction"
            for seq, kind, body, payload in found:
                whole = "x" * (seq * 7919 % 9000), seq.to_bytes(8, "little") * (seq % 900)
                assert (body, payload) == (("{}", b"") if kind == "end" else whole)
    journal = Journal.open(path)
    assert journal.last_seq == len(contents(path))
    journal.close()


def test_a_new_journal_appears_whole(path: Path) -> None:
    """An empty file is damage and never taken for a new journal; what is created is never empty."""
    path.touch()
    for read_only in (True, False):
        with pytest.raises(JournalDamaged, match="not a journal"):
            Journal.open(path, read_only=read_only)


def test_another_database_is_no_journal(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE records (seq INTEGER PRIMARY KEY, at, kind, body, payload, checksum)")
    database.commit()
    database.close()
    before = path.read_bytes()
    with pytest.raises(JournalDamaged, match="not a journal"):
        Journal.open(path)
    assert path.read_bytes() == before


def test_a_journal_of_an_earlier_format_is_refused_in_one_line(path: Path) -> None:
    earlier_format(path)
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(
            UserError, match=r"earlier version of headrace \(format 1.*begin a new one"
        ) as error:
            Journal.open(path, read_only=read_only)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="earlier version of headrace"):
        Journal.salvage(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
