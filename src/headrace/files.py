"""Files and folders that appear whole or not at all.

Invariants
* Under its final name a file or folder is always complete: it is written beside it under a temporary name,
  flushed to the disk, and renamed.
* On any failure the temporary is removed and what stood under the final name is untouched.
* A temporary's name starts with `TEMPORARY_PREFIX`, so that what a killed process left can be found and
  removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_PREFIX = ".tmp-"
"""How the name of every unfinished or discarded file and folder starts."""


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A binary stream whose content replaces `path` when the block ends without an exception.

    Raises:
        OSError: the disk refused; `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_beside(path)
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Make `data` the content of `path`, or leave `path` as it is and raise the `OSError`."""
    with atomic_file(path) as stream:
        stream.write(data)


@contextmanager
def atomic_folder(path: str | Path, *, replace: bool = True) -> Iterator[Path]:
    """A temporary sibling folder that becomes `path` when the block ends without an exception.

    An existing folder at `path` is set aside only after the new one is complete and on the disk. POSIX cannot
    exchange two folders in one step: a machine that stops between the two renames has no `path`, which
    is seen as missing and never as half written.

    Args:
        path: the folder to make; its parents are made if they are missing.
        replace: whether `path` may exist already.

    Raises:
        FileExistsError: `path` exists and `replace` is false, or `path` is not a folder.
        OSError: the disk refused; `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_existing(path, replace)
    temporary = _temporary_beside(path)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _move_into_place(temporary, path, replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(path.parent)


def remove_folder(path: str | Path) -> None:
    """Remove a folder so that it is never seen half removed under its own name."""
    path = Path(path)
    discarded = _temporary_beside(path)
    path.rename(discarded)
    _sync(path.parent)
    shutil.rmtree(discarded)


def remove_temporaries(folder: str | Path) -> None:
    """Remove what an interrupted process left in `folder`, to which nobody else may be writing now."""
    for entry in Path(folder).glob(f"{TEMPORARY_PREFIX}*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")


def _refuse_existing(path: Path, replace: bool) -> None:
    if os.path.lexists(path) and not replace:
        raise FileExistsError(errno.EEXIST, "exists already", str(path))
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        raise FileExistsError(errno.EEXIST, "exists and is not a folder", str(path))


def _move_into_place(temporary: Path, path: Path, replace: bool) -> None:
    _refuse_existing(path, replace)
    if not path.exists() or not replace:
        # Fails, as it should, where somebody has just filled a folder of this name.
        temporary.rename(path)
        return
    old = _temporary_beside(path)
    try:
        path.rename(old)
        temporary.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    # The new folder is in place whatever becomes of the old one; a leftover has a temporary's name.
    shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """`$HEADRACE_CACHE`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`; it need not exist."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "headrace"
