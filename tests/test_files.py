"""Files and folders appear whole or not at all, also when the disk is full or the process is killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.files import (
    TEMPORARY_PREFIX,
    atomic_file,
    atomic_folder,
    remove_folder,
    remove_temporaries,
    write_atomic,
)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, b"one")
    assert path.read_bytes() == b"one"
    with atomic_file(path) as stream:
        stream.write(b"two")
        stream.flush()
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["file"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    with full_disk(1000), pytest.raises(OSError, match="File too large"):
        write_atomic(path, b"x" * 100_000)
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["file"]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    with atomic_folder(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.name.startswith(TEMPORARY_PREFIX)
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("content")
        assert not path.exists()
    assert (path / "inner" / "file").read_text() == "content"
    assert names(path.parent) == ["one"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o777 & ~umask, "readable by others where the user's umask says so"


def test_a_folder_replaces_an_older_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    with atomic_folder(path) as temporary:
        (temporary / "old").touch()
    with atomic_folder(path) as temporary:
        (temporary / "new").touch()
        assert names(path) == ["old"]
    assert names(path) == ["new"]
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "step-1"

    def fail() -> None:
        with atomic_folder(path) as temporary:
            (temporary / "half").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []
    write_atomic(path / "old", b"one")
    with pytest.raises(error):
        fail()
    assert names(path) == ["old"]
    assert names(tmp_path) == ["step-1"]


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write_atomic(path / "old", b"one")

    def fill() -> None:
        with full_disk(1000), atomic_folder(path) as temporary:
            (temporary / "small").write_bytes(b"x")
            (temporary / "large").write_bytes(b"x" * 100_000)

    with pytest.raises(OSError, match="File too large"):
        fill()
    assert names(path) == ["old"]
    assert names(tmp_path) == ["step-1"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-1"
    write_atomic(path / "old", b"one")
    rename = os.rename

    def refuse_the_new_one(source: Path, target: Path) -> None:
        if Path(target) == path and (Path(source) / "new").exists():
            raise OSError("the disk is gone")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_the_new_one)
    with pytest.raises(OSError, match="the disk is gone"), atomic_folder(path) as temporary:
        (temporary / "new").touch()
    assert names(path) == ["old"]
    assert names(tmp_path) == ["step-1"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, rename = os.fsync, os.rename
    synced: set[int] = set()
    at_rename: set[int] = set()

    def spy_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def spy_rename(source: Path, target: Path) -> None:
        rename(source, target)
        at_rename.update(synced)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "file").write_text("content")
        entries = [temporary, temporary / "inner", temporary / "inner" / "file"]
        inodes = {entry.stat().st_ino for entry in entries}
    assert inodes <= at_rename
    assert tmp_path.stat().st_ino in synced, "the rename itself reaches the disk"


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name, replace in [
        ("file", True),
        ("file", False),
        ("folder", False),
        ("link", True),
        ("link", False),
    ]:
        with pytest.raises(FileExistsError, match="exists"), atomic_folder(tmp_path / name, replace=replace):
            pytest.fail("the block must not run")
    assert names(tmp_path) == ["file", "folder", "link"]


def test_a_name_that_is_taken_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(FileExistsError, match="exists already"), atomic_folder(path, replace=False):
        write_atomic(path / "theirs", b"")
    assert names(path) == ["theirs"]
    assert names(tmp_path) == ["run"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write_atomic(path / "old", b"one")
    code = (
        "import os, signal, sys\n"
        "from headrace.files import atomic_file, atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as folder, atomic_file(sys.argv[1] + '.log') as stream:\n"
        "    (folder / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 3
    assert names(path) == ["old"]
    remove_temporaries(tmp_path)
    assert names(tmp_path) == ["step-1"]
    assert names(path) == ["old"]


def test_a_folder_is_removed_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-1"
    write_atomic(path / "file", b"one")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda folder: None)  # a process that is killed before it removes
        remove_folder(path)
        assert not path.exists()
        assert len(names(tmp_path)) == 1
    remove_temporaries(tmp_path)
    assert names(tmp_path) == []
    write_atomic(path / "file", b"one")
    remove_folder(path)
    assert names(tmp_path) == []
