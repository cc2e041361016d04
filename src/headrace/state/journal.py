"""The journal of a run: everything that happened, event by event, in one SQLite file.

Invariants
* Events are numbered 1, 2, 3, … without gaps, and are never changed. Each carries a checksum over its number,
  time, kind and body and over the checksum before it: a row that is changed, missing, doubled or moved is
  found by whoever reads past it.
* `commit` writes what was recorded as one transaction. After `kill -9` at any instant the committed events
  are there and no others; a machine that loses power may lose the last commits, never the order.
* A file appears complete, with its table. So an empty or headless one is damage and never a new journal.
* One process writes (it holds the run folder's lock); any number may read meanwhile, and never hold it up.

Event bodies are JSON, with `NaN`, `Infinity` and `-Infinity` as Python writes them; floats come back exactly.
The database is in WAL mode while it is written. A journal that was closed is a single file again.
"""

from __future__ import annotations

import json
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

__all__ = ["BEGINNING", "Event", "Journal", "JournalDamaged", "Mark", "Salvaged"]

CHUNK_EVENTS = 256
"""Events per query of a reader: it holds no snapshot in between, so the writer's WAL can be emptied."""

_FIRST = bytes(16)  # the checksum "before" the first event


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `seq` counts from 1; `at` is unix time in seconds."""

    seq: int
    at: float
    kind: str
    body: dict[str, Any]


class Mark(NamedTuple):
    """A place in a journal: event `seq`, and by its checksum (hexadecimal) everything up to it."""

    seq: int
    checksum: str


BEGINNING = Mark(0, _FIRST.hex())
"""Where every journal begins."""


class _Row(NamedTuple):
    seq: int
    at: float
    kind: bytes
    body: bytes
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What `Journal.salvage` did: the last whole event, where the damaged file is now, and what was wrong."""

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
        self._checksum = _FIRST  # of the last recorded event

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False) -> Self:
        """Open a journal, and make it if it is missing and may be written.

        To write, every event is checked first, so that nothing is ever appended to a damaged journal.

        Raises:
            JournalDamaged: it is no journal, or (to write) some event of it is damaged.
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
                    connection.execute("SELECT max(seq) FROM events").fetchall()
        except BaseException:
            connection.close()
            raise
        return journal

    @property
    def last_seq(self) -> int:
        """The number of the last committed event, 0 if there is none."""
        if not self.read_only:
            return self._last_seq
        with self._explained(1):
            ((last,),) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchall()
        return int(last)

    @property
    def mark(self) -> Mark:
        """The place after the last committed event."""
        last = self.last_seq
        return Mark(last, self._checksum_of(last).hex())

    def holds(self, mark: Mark) -> bool:
        """Whether this journal once ended at that place: it has these events and no others before its later ones."""
        return mark.seq <= self.last_seq and self._checksum_of(mark.seq).hex() == mark.checksum

    def record(self, kind: str, body: dict[str, Any]) -> None:
        """Note one event for the next commit, as `body` is now.

        Raises:
            ValueError: JSON cannot hold the body.
        """
        self._refuse_read_only()
        try:
            data = json.dumps(body, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"a journal's event must be JSON data: {kind}: {error}") from error
        seq, at, name = self._last_seq + len(self._pending) + 1, time.time(), kind.encode()
        self._checksum = _checksum(self._checksum, seq, at, name, data)
        self._pending.append(_Row(seq, at, name, data, self._checksum))

    def commit(self) -> int:
        """Write what was recorded, all of it or nothing; returns the last event's number.

        Raises:
            RunError: the disk refused. The events stay recorded: another commit tries them again.
            JournalDamaged: the file is damaged.
        """
        self._refuse_read_only()
        if self._pending:
            with self._explained(self._last_seq + 1), self._transaction():
                self._connection.executemany(
                    "INSERT INTO events VALUES (?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?)", self._pending
                )
            self._last_seq = self._pending[-1].seq
            self._pending.clear()
        return self._last_seq

    def read(self, after: int = 0, kinds: Collection[str] | None = None) -> Iterator[Event]:
        """The committed events with numbers above `after`, in order; with `kinds` only those, but all are checked.

        Events that another process commits meanwhile may be among them.

        Raises:
            JournalDamaged: at the first event that is not as it was written, once all before it were yielded; or
                event `after` itself is not there.
        """
        wanted = None if kinds is None else {kind.encode() for kind in kinds}
        for row in self._rows(after):
            if wanted is None or row.kind in wanted:
                yield Event(row.seq, row.at, row.kind.decode(), json.loads(row.body))

    def close(self) -> None:
        """Close the file; events that were recorded and not committed are dropped. May be called twice."""
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
        """Replace a damaged journal by one of its whole events, and set the damaged file aside.

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
            copy._take_whole_events(path)
            copy.close()
            kept_as = cls.set_aside(path)
            # A crash between the two renames leaves the damaged file under its new name, and nothing lost but time.
            temporary.rename(path)
        finally:
            copy.close()
            temporary.unlink(missing_ok=True)
        return Salvaged(copy._last_seq, kept_as, damage)

    # Inside

    def _take_whole_events(self, path: Path) -> None:
        """Append the events of the journal at `path`, up to where it is damaged."""
        with suppress(JournalDamaged):
            source = Journal.open(path, read_only=True)
            try:
                for row in source._rows(0):
                    self._pending.append(row)
                    if len(self._pending) == CHUNK_EVENTS:
                        self.commit()
            finally:
                source.close()
        self.commit()

    def _check(self) -> None:
        """Read everything, and stand at the end."""
        with self._explained(1):
            ((verdict,),) = self._connection.execute("PRAGMA quick_check(1)").fetchall()
        last = _Row(0, 0.0, b"", b"", _FIRST)
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
        while rows := self._query(seq + 1, f"{SELECT} WHERE seq > ? ORDER BY seq LIMIT ?", seq, CHUNK_EVENTS):
            for values in rows:
                seq += 1
                row = _Row(*values)
                if row.seq != seq:
                    raise JournalDamaged(seq, f"it is missing; event {row.seq} stands in its place")
                try:
                    right = _checksum(checksum, seq, row.at, row.kind, row.body) == row.checksum
                except (TypeError, struct.error):
                    right = False
                if not right:
                    raise JournalDamaged(seq, "its checksum is wrong")
                checksum = row.checksum
                yield row

    def _checksum_of(self, seq: int) -> bytes:
        if seq == 0:
            return _FIRST
        rows = self._query(seq, "SELECT checksum FROM events WHERE seq = ?", seq)
        if not rows:
            raise JournalDamaged(seq, "it is missing")
        return rows[0][0]  # type: ignore[no-any-return]

    def _query(self, seq: int, statement: str, *values: Any) -> list[Any]:
        """All rows of a query whose failure means that event `seq` cannot be read."""
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


def _checksum(before: bytes, seq: int, at: float, kind: bytes, body: bytes) -> bytes:
    digest = blake2b(before, digest_size=16)
    digest.update(struct.pack("<qdq", seq, at, len(kind)))
    digest.update(kind)
    digest.update(body)
    return digest.digest()
