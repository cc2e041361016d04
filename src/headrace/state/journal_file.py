"""The journal's file: how it is made and opened, and what SQLite's refusals mean.

Invariant: whatever SQLite raises is either a refusal of the disk (`RunError`) or damage (`JournalDamaged`).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import RunError, UserError
from headrace.files import write_atomic

APPLICATION_ID = 0x68656164
"""Says in the file's header that this database is a journal ("head")."""

FORMAT = 2
"""The table's layout; a reader refuses others."""

BUSY_TIMEOUT_S = 10.0
"""How long a connection waits for another one's lock. Only opening and closing take a lock that others feel."""

PAGE_BYTES = 8192
SIDE_FILES = ("-wal", "-shm")
SELECT = "SELECT seq, at, kind, body, payload, checksum FROM records"

_REFUSED = {
    sqlite3.SQLITE_FULL: "the disk is full; free some of it",
    sqlite3.SQLITE_READONLY: "it is read-only; make it and its folder writable",
    sqlite3.SQLITE_PERM: "it may not be used; check its permissions",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check it and its folder",
    sqlite3.SQLITE_IOERR: "the disk refused; mend it",
    sqlite3.SQLITE_BUSY: "another process holds it; stop that one",
    sqlite3.SQLITE_LOCKED: "another process holds it; stop that one",
    sqlite3.SQLITE_NOMEM: "memory ran out; free some",
}
"""What SQLite says when the file is not to blame, by its primary result code."""


class JournalDamaged(RunError):
    """Record `seq` is the first one that cannot be read or trusted; those before it are whole.

    Attributes:
        seq: its number, from 1.
        why: what is wrong.
    """

    def __init__(self, seq: int, why: str) -> None:
        super().__init__(f"from record {seq} on: {why}")
        self.seq, self.why = seq, why


class OtherFormat(UserError):
    """A journal of an earlier version of headrace: whole, and not for this one to read."""


@contextmanager
def explained(path: Path, seq: int) -> Iterator[None]:
    """Turn what SQLite raises into a refusal of the disk, or into damage at record `seq`."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # a closed journal, say
    except sqlite3.IntegrityError as error:
        raise RunError(f"{path}: another process writes to it too ({error}); stop that one") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        # A file that ends too early is its own fault.
        reason = None if code == sqlite3.SQLITE_IOERR_SHORT_READ else _REFUSED.get(code & 0xFF)
        if reason is None:
            raise JournalDamaged(seq, str(error)) from error
        raise RunError(f"{path}: {reason} ({error})") from error


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """A connection to an existing file; `read_only` ones wait for no writer, and need no folder to write to."""

    def open_with(options: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.as_uri()}?{options}", timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=True
        )
        # Checksums are taken over what stands in the file, before anything is made of it.
        connection.text_factory = bytes
        return connection

    with explained(path, 1):
        if not read_only:
            return open_with("mode=rw")
        connection = open_with("mode=ro")
        try:
            connection.execute("SELECT * FROM sqlite_master").fetchall()
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            # In a folder that nobody can write to nobody writes: no locks are needed.
            connection = open_with("immutable=1")
        return connection


def create(path: Path) -> None:
    """Make an empty journal, which appears with its table."""
    if beside(path, "-wal").exists():
        raise JournalDamaged(1, f"the file is gone, and only {path.name}-wal is left")
    memory = sqlite3.connect(":memory:")
    memory.executescript(
        f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
        "CREATE TABLE records (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, "
        "payload BLOB NOT NULL, checksum BLOB NOT NULL);"
    )
    try:
        write_atomic(path, memory.serialize())
    except OSError as error:
        raise RunError(
            f"{path} cannot be made: {error.strerror}; free some of the disk or make it writable"
        ) from error
    finally:
        memory.close()


def check_format(path: Path, connection: sqlite3.Connection) -> None:
    """Raise unless the database is a journal of this format."""
    with path.open("rb") as file:
        modes = file.read(20)[18:]
    # SQLite takes a file of modes that it does not know for one that it may only read.
    if modes not in (b"\1\1", b"\2\2", b""):
        raise JournalDamaged(1, "its header is damaged")
    ((application,),) = connection.execute("PRAGMA application_id").fetchall()
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if application != APPLICATION_ID:
        raise JournalDamaged(1, "it is not a journal")
    if 0 < version < FORMAT:
        raise OtherFormat(
            f"{path} is a journal of an earlier version of headrace (format {version}, and this one reads {FORMAT}): "
            "look at the run with the version that wrote it, or begin a new one with model.name = a checkpoint of it"
        )
    if version != FORMAT:
        raise JournalDamaged(1, f"its format is {version}, and this version of headrace reads {FORMAT}")
    connection.execute(f"{SELECT} LIMIT 0")


def set_aside(path: Path) -> Path:
    """Rename a database and its side files; see `Journal.set_aside`."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    try:
        # The side files first: beside a new journal they would be taken for its own.
        for suffix in SIDE_FILES:
            with suppress(FileNotFoundError):
                beside(path, suffix).rename(beside(aside, suffix))
        with suppress(FileNotFoundError):
            path.rename(aside)
    except OSError as error:
        raise RunError(f"{path} cannot be set aside: {error.strerror}; make its folder writable") from error
    return aside


def beside(path: Path, suffix: str) -> Path:
    """A database's side file."""
    return path.with_name(path.name + suffix)
