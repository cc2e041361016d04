"""Whatever happens to a journal's files: it is found, or what is read is exactly what was written up to some record."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.state.journal import Journal, JournalDamaged, Stored

Read = list[tuple[int, float, str, bytes, bytes]]

KINDS = ("tokens", "world", "step")


def write(path: Path, records: int, unfinished: bool = False) -> Read:
    """A journal of so many records, some longer than a page; `unfinished` leaves its WAL as a crash would."""
    rng = random.Random(records)
    journal = Journal.open(path)
    for number in range(records):
        body = f"number {number} " + "".join(rng.choices("abcdef", k=rng.choice((5, 60, 700, 20_000))))
        journal.record(KINDS[number % 3], body, rng.randbytes(rng.choice((0, 9, 20_000))))
        if number % 4 == 3:
            journal.commit()
    journal.commit()
    if unfinished:
        for suffix in ("", "-wal"):
            (path.parent / f"copy{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    written = [_facts(one) for one in journal.read()]
    journal.close()
    if unfinished:
        for suffix in ("", "-wal"):
            (path.parent / f"copy{suffix}").rename(f"{path}{suffix}")
    return written


def _facts(one: Stored) -> tuple[int, float, str, bytes, bytes]:
    return one.seq, one.at, one.kind, one.body, one.payload


def read(path: Path) -> tuple[Read, JournalDamaged | None]:
    """What can be read, and what stopped the reading."""
    found: Read = []
    try:
        reader = Journal.open(path, read_only=True)
    except JournalDamaged as error:
        return [], error
    damage = None
    try:
        for one in reader.read():
            found.append(_facts(one))
    except JournalDamaged as error:
        damage = error
    reader.close()
    assert damage is None or damage.seq == len(found) + 1
    return found, damage


def check(path: Path, written: Read) -> None:
    """Whatever was done to the file: readers, writers and `salvage` see a prefix of what was written, or damage."""
    found, damage = read(path)
    assert found == written[: len(found)]
    try:
        journal = Journal.open(path)
    except JournalDamaged:
        salvaged = Journal.salvage(path)
        assert salvaged is not None
        assert salvaged.kept_as.exists()
        assert salvaged.last_seq == len(found)
        journal = Journal.open(path)
    else:
        assert damage is None
    # A writer goes on after a prefix, and all of it can be read.
    length = journal.last_seq
    journal.record("more", f"after {length}", b"payload")
    journal.commit()
    journal.close()
    again, damage = read(path)
    assert damage is None
    assert again[:-1] == written[:length]
    assert again[-1][2:] == ("more", f"after {length}".encode(), b"payload")


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Read]:
    """A journal that was closed: its files, and what was written."""
    path = tmp_path_factory.mktemp("closed") / "journal.sqlite"
    written = write(path, 40)
    return {"": path.read_bytes()}, written


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], Read]:
    """A journal whose writer died: most of it still stands in its WAL."""
    path = tmp_path_factory.mktemp("crashed") / "journal.sqlite"
    written = write(path, 24, unfinished=True)
    return {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}, written


def place(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "journal.sqlite"
    for leftover in folder.iterdir():
        leftover.unlink()
    for suffix, data in files.items():
        Path(f"{path}{suffix}").write_bytes(data)
    return path


@pytest.mark.parametrize("state", ["closed", "crashed"])
def test_undamaged_it_is_read_whole(state: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    files, written = request.getfixturevalue(state)
    assert read(place(tmp_path, files)) == (written, None)
    assert Journal.salvage(tmp_path / "journal.sqlite") is None
    check(tmp_path / "journal.sqlite", written)


@pytest.mark.parametrize("state", ["closed", "crashed"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_flipped_byte(
    state: str, request: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files, written = request.getfixturevalue(state)
    suffix = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[suffix])
    # The headers of pages are few bytes, and matter most.
    page = 8192 * data.draw(st.integers(0, (len(content) - 1) // 8192))
    offset = data.draw(
        st.integers(page, min(page + 120, len(content) - 1)) | st.integers(0, len(content) - 1)
    )
    content[offset] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.getbasetemp() / f"flipped-{state}"
    folder.mkdir(exist_ok=True)
    check(place(folder, files | {suffix: bytes(content)}), written)


@pytest.mark.parametrize("state", ["closed", "crashed"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_that_ends_too_early(
    state: str, request: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files, written = request.getfixturevalue(state)
    suffix = data.draw(st.sampled_from(sorted(files)))
    length = data.draw(
        st.integers(0, len(files[suffix]) - 1)
        | st.integers(0, len(files[suffix]) // 8192 - 1).map(lambda n: 8192 * n)
    )
    folder = tmp_path_factory.getbasetemp() / f"truncated-{state}"
    folder.mkdir(exist_ok=True)
    check(place(folder, files | {suffix: files[suffix][:length]}), written)


@pytest.mark.parametrize("state", ["closed", "crashed"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_page_that_was_overwritten(
    state: str, request: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files, written = request.getfixturevalue(state)
    content = bytearray(files[""])
    pages = len(content) // 8192
    to, source = (8192 * data.draw(st.integers(0, pages - 1)) for _ in range(2))
    content[to : to + 8192] = data.draw(
        st.sampled_from([bytes(8192), bytes(content[source : source + 8192])])
    )
    folder = tmp_path_factory.getbasetemp() / f"overwritten-{state}"
    folder.mkdir(exist_ok=True)
    check(place(folder, files | {"": bytes(content)}), written)


SQL: dict[str, tuple[str, int]] = {
    "a changed body": ("UPDATE records SET body = replace(body, 'number', 'numbre') WHERE seq = 7", 7),
    "a changed kind": ("UPDATE records SET kind = 'other' WHERE seq = 7", 7),
    "a changed payload": ("UPDATE records SET payload = CAST('other' AS BLOB) WHERE seq = 7", 7),
    "a byte that moved from the body to the payload": (
        "UPDATE records SET payload = CAST(substr(body, -1) AS BLOB) || payload, "
        "body = substr(body, 1, length(body) - 1) WHERE seq = 7",
        7,
    ),
    "a changed time": ("UPDATE records SET at = at + 1e-6 WHERE seq = 7", 7),
    "a changed checksum": ("UPDATE records SET checksum = zeroblob(16) WHERE seq = 7", 7),
    "a missing row": ("DELETE FROM records WHERE seq = 7", 7),
    "a missing first row": ("DELETE FROM records WHERE seq = 1", 1),
    "exchanged rows": (
        "UPDATE records SET seq = -1 WHERE seq = 7; UPDATE records SET seq = 7 WHERE seq = 9;"
        "UPDATE records SET seq = 9 WHERE seq = -1",
        7,
    ),
    "a row of another kind": ("UPDATE records SET body = 7 WHERE seq = 7", 7),
    "a payload of another kind": ("UPDATE records SET payload = 7 WHERE seq = 7", 7),
    "a repeated row": (
        "INSERT INTO records SELECT 41, at, kind, body, payload, checksum FROM records WHERE seq = 40",
        41,
    ),
    "a row before the first": (
        "INSERT INTO records SELECT 0, at, kind, body, payload, checksum FROM records WHERE seq = 1",
        41,
    ),
    "no table": ("DROP TABLE records", 1),
    "another format": ("PRAGMA user_version = 3", 1),
}


@pytest.mark.parametrize("case", SQL)
def test_rows_that_were_tampered_with(
    case: str, closed: tuple[dict[str, bytes], Read], tmp_path: Path
) -> None:
    files, written = closed
    path = place(tmp_path, files)
    database = sqlite3.connect(path)
    statement, seq = SQL[case]
    database.executescript(statement)
    database.close()
    found, damage = read(path)
    if case == "a row before the first":
        return check(path, written)
    assert damage is not None
    assert damage.seq == seq
    assert found == written[: seq - 1]
    with pytest.raises(JournalDamaged) as caught:
        Journal.open(path)
    assert caught.value.seq == seq
    assert "\n" not in str(caught.value)
    return check(path, written)


def test_a_missing_row_is_called_missing(closed: tuple[dict[str, bytes], Read], tmp_path: Path) -> None:
    path = place(tmp_path, closed[0])
    database = sqlite3.connect(path)
    database.executescript(SQL["a missing row"][0])
    database.close()
    _, damage = read(path)
    assert damage is not None
    assert str(damage) == "from record 7 on: it is missing; record 8 stands in its place"


def test_a_row_of_another_journal(closed: tuple[dict[str, bytes], Read], tmp_path: Path) -> None:
    """Whole in itself, and of the same number: only what comes before it is another."""
    files, written = closed
    path = place(tmp_path, files)
    write(tmp_path / "other.sqlite", 9)
    database = sqlite3.connect(path)
    database.execute("ATTACH ? AS other", (str(tmp_path / "other.sqlite"),))
    database.execute("REPLACE INTO main.records SELECT * FROM other.records WHERE seq = 7")
    database.commit()
    database.close()
    found, damage = read(path)
    assert damage is not None
    assert found == written[:6]


@pytest.mark.parametrize(("offset", "value"), [(18, 3), (19, 3), (52, 1)])
def test_a_header_that_only_writers_would_mind(
    offset: int, value: int, closed: tuple[dict[str, bytes], Read], tmp_path: Path
) -> None:
    """Every record may be read, yet nothing is appended before the file was made anew."""
    files, written = closed
    content = bytearray(files[""])
    content[offset] = value
    path = place(tmp_path, {"": bytes(content)})
    with pytest.raises(JournalDamaged):
        Journal.open(path)
    salvaged = Journal.salvage(path)
    assert salvaged is not None
    assert read(path) == (written[: salvaged.last_seq], None)
    Journal.open(path).close()


def test_a_missing_file_beside_its_wal(crashed: tuple[dict[str, bytes], Read], tmp_path: Path) -> None:
    files, _ = crashed
    path = place(tmp_path, {"-wal": files["-wal"]})
    with pytest.raises(JournalDamaged, match="the file is gone"):
        Journal.open(path)
    aside = Journal.set_aside(path)
    assert Path(f"{aside}-wal").exists()
    Journal.open(path).close()


def test_setting_aside_takes_everything_along(crashed: tuple[dict[str, bytes], Read], tmp_path: Path) -> None:
    files, written = crashed
    for number in (1, 2):
        path = tmp_path / "journal.sqlite"
        for suffix, data in files.items():
            Path(f"{path}{suffix}").write_bytes(data)
        aside = Journal.set_aside(path)
        assert aside == tmp_path / f"journal.sqlite.damaged-{number}"
        assert not list(tmp_path.glob("journal.sqlite")) + list(tmp_path.glob("journal.sqlite-*"))
        # It is still the journal that it was, its WAL too.
        assert read(aside) == (written, None)
    # The new one owes nothing to it.
    fresh = Journal.open(tmp_path / "journal.sqlite")
    assert fresh.last_seq == 0
    fresh.close()


def damage_at(path: Path, seq: int) -> None:
    database = sqlite3.connect(path)
    database.execute("UPDATE records SET kind = 'other' WHERE seq = ?", (seq,))
    database.commit()
    database.close()


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_salvaging_loses_nothing(
    renames: int, closed: tuple[dict[str, bytes], Read], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies before the damaged file is set aside, and between that and the new one's coming."""
    files, written = closed
    path = place(tmp_path, files)
    damage_at(path, 30)
    rename, left = Path.rename, [renames]

    def rename_or_die(self: Path, target: Path) -> Path:
        if self.exists():
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    with pytest.raises(KeyboardInterrupt):
        Journal.salvage(path)
    monkeypatch.undo()
    damaged = path if renames == 0 else tmp_path / "journal.sqlite.damaged-1"
    assert read(damaged)[0] == written[:29]
    salvaged = Journal.salvage(damaged)
    assert salvaged is not None
    assert salvaged.last_seq == 29
    assert salvaged.damage.seq == 30
    assert read(damaged) == (written[:29], None)
    assert not list(tmp_path.glob(".tmp-*"))
