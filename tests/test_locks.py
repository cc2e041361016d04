"""Locks exclude other handles, here and in other processes, and end with their holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.locks import file_is_locked, held, lock, lock_file, locked, try_lock, unlock

HOLD = (
    "import sys, headrace.locks as locks\n"
    "locks.lock_file(sys.argv[1], timeout_s=0)\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def handles(path: Path) -> Iterator[list[int]]:
    """Three handles on one file."""
    files = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3)]
    yield files
    for file in files:
        os.close(file)


def test_an_exclusive_lock_excludes_all_others(handles: list[int]) -> None:
    a, b, _ = handles
    assert try_lock(a, 0, exclusive=True)
    assert not try_lock(b, 0, exclusive=True)
    assert not try_lock(b, 0, exclusive=False)
    assert try_lock(a, 0, exclusive=True), "the holder may ask again"
    unlock(a, 0)
    assert try_lock(b, 0, exclusive=True)


def test_shared_locks_exclude_exclusive_ones_only(handles: list[int]) -> None:
    a, b, c = handles
    assert try_lock(a, 0, exclusive=False)
    assert try_lock(b, 0, exclusive=False)
    assert not try_lock(c, 0, exclusive=True)
    assert not try_lock(a, 0, exclusive=True), "another one shares it"
    unlock(b, 0)
    assert try_lock(a, 0, exclusive=True), "a sole holder may make it exclusive"
    assert not try_lock(b, 0, exclusive=False)


def test_bytes_are_locked_apart_and_need_not_exist(handles: list[int]) -> None:
    a, b, _ = handles
    far = 1 << 40
    assert try_lock(a, 0, exclusive=True)
    assert try_lock(b, 1, exclusive=True)
    assert try_lock(b, far, exclusive=True)
    assert not try_lock(a, far, exclusive=True)
    unlock(b, 1)
    assert not try_lock(a, far, exclusive=True), "only byte 1 was given up"


def test_looking_takes_no_lock_and_sees_others_only(handles: list[int], path: Path) -> None:
    a, b, c = handles
    assert not held(a, 0)
    assert try_lock(b, 0, exclusive=False)
    assert held(a, 0)
    assert not held(b, 0), "a handle does not see its own"
    assert not held(a, 1)
    assert try_lock(c, 0, exclusive=False)
    assert file_is_locked(path)
    path.chmod(0o400)
    assert file_is_locked(path), "a handle that may only read can look"
    unlock(b, 0)
    unlock(c, 0)
    assert not file_is_locked(path)
    assert not file_is_locked(path.with_name("missing"))


def test_waiting_ends_with_the_lock_or_the_time(handles: list[int]) -> None:
    a, b, _ = handles
    assert try_lock(a, 0, exclusive=True)
    started = time.monotonic()
    assert not lock(b, 0, exclusive=True, timeout_s=0.1)
    assert time.monotonic() - started >= 0.1
    release = threading.Timer(0.05, unlock, (a, 0))
    release.start()
    assert lock(b, 0, exclusive=True, timeout_s=60)
    release.join()


def test_a_locked_file_is_free_again_after_the_block(path: Path) -> None:
    with locked(path, timeout_s=0):
        assert file_is_locked(path)
        with pytest.raises(TimeoutError):
            lock_file(path, timeout_s=0)
        files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TimeoutError):
            lock_file(path, timeout_s=0.01)
        assert len(os.listdir("/proc/self/fd")) == files, "a handle was left open"
    assert not file_is_locked(path)
    assert path.exists()
    with pytest.raises(RuntimeError), locked(path, timeout_s=0):
        raise RuntimeError
    os.close(lock_file(path, timeout_s=0))


def test_a_killed_holder_releases_its_lock(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert file_is_locked(path)
        with pytest.raises(TimeoutError):
            lock_file(path, timeout_s=0)
        other.send_signal(signal.SIGKILL)
        os.close(lock_file(path, timeout_s=60))


def test_a_started_program_does_not_keep_the_lock(path: Path) -> None:
    file = lock_file(path, timeout_s=0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as other:
        os.close(file)
        os.close(lock_file(path, timeout_s=60))  # the program closes its copy when it starts, maybe just now
        assert other.poll() is None
        other.communicate(b"\n")


def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_file(tmp_path / "no" / "lock", timeout_s=0)
