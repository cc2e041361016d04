"""A journal: numbered records in one SQLite file, each of a kind, a text and some bytes.

Invariants
* Records are numbered 1, 2, 3, … without gaps, and are never changed. Each carries a checksum over its number,
  time, kind, body and payload and over the checksum before it: a row that is changed, missing, doubled or moved is
  found by whoever reads past it.
* `commit` writes what was recorded as one transaction. After `kill -9` at any instant the committed records
  are there and no others; a machine that loses power may lose the last commits, never the order.
* A file appears complete, with its table. So an empty or headless one is damage and never a new journal.
* One process writes (it holds the run folder's lock); any number may read meanwhile, and never hold it up.

What bodies and payloads mean is the writer's business (a run's are frames of events, `runs/events.py`).
The database is in WAL mode while it is written. A journal that was closed is a single file again.
"""

from __future__ import annotations

import sqlite3
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from headrace.errors import UserError
from headrace.files import TEMPORARY_PREFIX
from headrace.state.journal_file import (
    SELECT,
    SIDE_FILES,
    JournalDamaged,
    beside,
    check_format,
    connect,
    create,
    explained,
    set_aside,
)

__all__ = ["BEGINNING", "Journal", "JournalDamaged", "Mark", "Salvaged", "Stored"]

CHUNK_RECORDS = 256
"""Records per query of a reader: it holds no snapshot in between, so the writer's WAL can be emptied."""

_FIRST = bytes(16)  # the checksum "before" the first record


@dataclass(frozen=True, slots=True)
class Stored:
    """One record. `seq` counts from 1; `at` is unix time in seconds."""

    seq: int
    at: float
    kind: str
    body: bytes
    payload: bytes


class Mark(NamedTuple):
    """A place in a journal: record `seq`, and by its checksum (hexadecimal) everything up to it."""

    seq: int
    checksum: str


BEGINNING = Mark(0, _FIRST.hex())
"""Where every journal begins."""


class _Row(NamedTuple):
    seq: int
    at: float
    kind: bytes
    body: bytes
    payload: bytes
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What `Journal.salvage` did: the last whole record, where the damaged file is now, and what was wrong."""

    last_seq: int
    kept_as: Path
    damage: JournalDamaged


class Journal:
    """An open journal. Use `open` and, at the end, `close`.

    Attributes:
        path: the file, absolute.
        read_only: whether it was opened to read.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection = connection
        self._pending: list[_Row] = []
        self._last_seq = 0
        self._checksum = _FIRST  # of the last recorded record

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False) -> Self:
        """Open a journal, and make it if it is missing and may be written.

        To write, every record is checked first, so that nothing is ever appended to a damaged journal.

        Raises:
            JournalDamaged: it is no journal, or (to write) some record of it is damaged.
            UserError: it is missing, and only to be read.
            RunError: the disk refused.
        """
        path = Path(path).absolute()
        if not path.exists():
            if read_only:
                raise UserError(f"{path}: no such file; only runs that keep a journal have one")
            create(path)
        connection = connect(path, read_only)
        journal = cls(path, connection, read_only)
        try:
            with journal._explained(1):
                check_format(path, connection)
            if not read_only:
                journal._check()
                # Only now is anything changed: a damaged file is left as it is.
                with journal._explained(1):
                    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
                    if mode == b"wal":  # some network file systems have none
                        # Commits are safe from the death of this process, and wait for no disk.
                        connection.execute("PRAGMA synchronous = NORMAL")
                    # SQLite opens the WAL at the first query, and only what is open is taken away at the end.
                    connection.execute("SELECT max(seq) FROM records").fetchall()
        except BaseException:
            connection.close()
            raise
        return journal

    @property
    def last_seq(self) -> int:
        """The number of the last committed record, 0 if there is none."""
        if not self.read_only:
            return self._last_seq
        with self._explained(1):
            ((last,),) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM records").fetchall()
        return int(last)

    @property
    def mark(self) -> Mark:
        """The place after the last committed record."""
        last = self.last_seq
        return Mark(last, self._checksum_of(last).hex())

    def holds(self, mark: Mark) -> bool:
        """Whether this journal once ended at that place: it has these records and no others before its later ones."""
        return mark.seq <= self.last_seq and self._checksum_of(mark.seq).hex() == mark.checksum

    def record(self, kind: str, body: str, payload: bytes = b"") -> None:
        """Note one record for the next commit. A kind that stands for several is joined by "+"."""
        self._refuse_read_only()
        seq, at, name, data = (
            self._last_seq + len(self._pending) + 1,
            time.time(),
            kind.encode(),
            body.encode(),
        )
        self._checksum = _checksum(self._checksum, seq, at, name, data, payload)
        self._pending.append(_Row(seq, at, name, data, payload, self._checksum))

    def commit(self) -> int:
        """Write what was recorded, all of it or nothing; returns the last record's number.

        Raises:
            RunError: the disk refused. The records stay recorded: another commit tries them again.
            JournalDamaged: the file is damaged.
        """
        self._refuse_read_only()
        if self._pending:
            with self._explained(self._last_seq + 1), self._transaction():
                self._connection.executemany(
                    "INSERT INTO records VALUES (?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?)", self._pending
                )
            self._last_seq = self._pending[-1].seq
            self._pending.clear()
        return self._last_seq

    def read(self, after: int = 0, kinds: Collection[str] | None = None) -> Iterator[Stored]:
        """The committed records with numbers above `after`, in order; all of them are checked.

        Args:
            kinds: only those of which a part is of one of these kinds.

        Events that another process commits meanwhile may be among them.

        Raises:
            JournalDamaged: at the first record that is not as it was written, once all before it were yielded; or
                record `after` itself is not there.
        """
        wanted = None if kinds is None else {kind.encode() for kind in kinds}
        for row in self._rows(after):
            if wanted is None or not wanted.isdisjoint(row.kind.split(b"+")):
                yield Stored(row.seq, row.at, row.kind.decode(), row.body, row.payload)

    def close(self) -> None:
        """Close the file; records that were recorded and not committed are dropped. May be called twice."""
        self._pending.clear()
        if not self.read_only:
            # Leaves one file that can be read anywhere. While somebody reads, it stays as it is, which does no harm.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA busy_timeout = 0")
                self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.close()

    # Damaged files

    @staticmethod
    def set_aside(path: str | Path) -> Path:
        """Rename a journal and its side files to `<name>.damaged-N`, N the first unused number; returns that path.

        Raises:
            RunError: the disk refused.
        """
        return set_aside(Path(path).absolute())

    @classmethod
    def salvage(cls, path: str | Path) -> Salvaged | None:
        """Replace a damaged journal by one of its whole records, and set the damaged file aside.

        Returns None, and changes nothing, for a journal without damage.

        Raises:
            RunError: the disk refused.
        """
        path = Path(path).absolute()
        try:
            cls.open(path).close()
        except JournalDamaged as error:
            damage = error
        else:
            return None
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        for suffix in ("", *SIDE_FILES):
            beside(temporary, suffix).unlink(missing_ok=True)
        copy = cls.open(temporary)
        try:
            copy._take_whole_records(path)
            copy.close()
            kept_as = cls.set_aside(path)
            # A crash between the two renames leaves the damaged file under its new name, and nothing lost but time.
            temporary.rename(path)
        finally:
            copy.close()
            temporary.unlink(missing_ok=True)
        return Salvaged(copy._last_seq, kept_as, damage)

    # Inside

    def _take_whole_records(self, path: Path) -> None:
        """Append the records of the journal at `path`, up to where it is damaged."""
        with suppress(JournalDamaged):
            source = Journal.open(path, read_only=True)
            try:
                for row in source._rows(0):
                    self._pending.append(row)
                    if len(self._pending) == CHUNK_RECORDS:
                        self.commit()
            finally:
                source.close()
        self.commit()

    def _check(self) -> None:
        """Read everything, and stand at the end."""
        with self._explained(1):
            ((verdict,),) = self._connection.execute("PRAGMA quick_check(1)").fetchall()
        last = _Row(0, 0.0, b"", b"", b"", _FIRST)
        for last in self._rows(0):  # noqa: B007 - only the last one is of use
            pass
        if verdict != b"ok":
            raise JournalDamaged(
                last.seq + 1, f"SQLite finds {' '.join(verdict.decode(errors='replace').split())}"
            )
        self._last_seq, self._checksum = last.seq, last.checksum

    def _rows(self, after: int) -> Iterator[_Row]:
        """The rows above `after`, each one checked against the one before it."""
        seq, checksum = after, self._checksum_of(after)
        while rows := self._query(
            seq + 1, f"{SELECT} WHERE seq > ? ORDER BY seq LIMIT ?", seq, CHUNK_RECORDS
        ):
            for values in rows:
                seq += 1
                row = _Row(*values)
                if row.seq != seq:
                    raise JournalDamaged(seq, f"it is missing; record {row.seq} stands in its place")
                try:
                    right = _checksum(checksum, seq, row.at, row.kind, row.body, row.payload) == row.checksum
                except (TypeError, struct.error):
                    right = False
                if not right:
                    raise JournalDamaged(seq, "its checksum is wrong")
                checksum = row.checksum
                yield row

    def _checksum_of(self, seq: int) -> bytes:
        if seq == 0:
            return _FIRST
        rows = self._query(seq, "SELECT checksum FROM records WHERE seq = ?", seq)
        if not rows:
            raise JournalDamaged(seq, "it is missing")
        return rows[0][0]  # type: ignore[no-any-return]

    def _query(self, seq: int, statement: str, *values: Any) -> list[Any]:
        """All rows of a query whose failure means that record `seq` cannot be read."""
        with self._explained(seq):
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself where it could not go on.
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self, seq: int) -> Iterator[None]:
        with explained(self.path, seq):
            yield

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise RuntimeError(f"{self.path} is open to read only")


def _checksum(before: bytes, seq: int, at: float, kind: bytes, body: bytes, payload: bytes) -> bytes:
    digest = blake2b(before, digest_size=16)
    digest.update(struct.pack("<qdqq", seq, at, len(kind), len(body)))
    digest.update(kind)
    digest.update(body)
    digest.update(payload)
    return digest.digest()
