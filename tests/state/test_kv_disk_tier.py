"""Blocks on disk: any damage gives what was written or a miss; the bound holds; runs and processes share the folder."""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kv_cases import BLOCK_BYTES, A, B, Clock, insert, make_directory, make_disk, restored

from headrace.state.directory import Directory
from headrace.state.eviction import Kind
from headrace.state.tiers import disk as disk_module
from headrace.state.tiers import shelf as shelf_module
from headrace.state.tiers.base import DEVICE, DISK
from headrace.state.tiers.extent import MAX_BLOCKS
from headrace.state.tiers.shelf import Shelf

CHAIN = list(range(32))
SUPPORT = Path(__file__).parents[1] / "support"


def directory_on(folder: Path, files: int = 1000, **settings: object) -> Directory:
    return make_directory(disk=make_disk(folder, files, **settings))


def filled(folder: Path) -> None:
    """Two files: one of eight blocks, and one of three that go on from its second block."""
    directory = directory_on(folder)
    insert(directory, CHAIN)
    directory.migrate(CHAIN, DEVICE, DISK)
    insert(directory, [*CHAIN[:8], *range(50, 62)])
    directory.close()
    assert len(files(folder)) == 2


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


Damage = Callable[[Path, np.random.Generator], None]


def flip(path: Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    # Headers are small: hit them as often as data.
    end = 400 if rng.random() < 0.5 else len(data)
    for _ in range(int(rng.integers(1, 4))):
        data[int(rng.integers(end))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def truncate(path: Path, rng: np.random.Generator) -> None:
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def lengthen(path: Path, rng: np.random.Generator) -> None:
    with path.open("ab") as stream:
        stream.write(b"x" * int(rng.integers(1, 500)))


def delete(path: Path, rng: np.random.Generator) -> None:
    path.unlink()


def rename(path: Path, rng: np.random.Generator) -> None:
    """A name of another block, or of none."""
    name = f"{rng.bytes(16).hex()}-9-9-9-0.kv" if rng.random() < 0.5 else "what.kv"
    path.rename(path.with_name(name))


def exchange(path: Path, rng: np.random.Generator) -> None:
    one, other = files(path.parents[1])
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def mix_data(path: Path, rng: np.random.Generator) -> None:
    """Whole blocks change places; each has an intact fingerprint somewhere."""
    data = bytearray(path.read_bytes())
    at = len(data) - 2 * BLOCK_BYTES
    data[at : at + BLOCK_BYTES], data[at + BLOCK_BYTES :] = (
        data[at + BLOCK_BYTES :],
        data[at : at + BLOCK_BYTES],
    )
    path.write_bytes(data)


def other_identity(path: Path, rng: np.random.Generator) -> None:
    """The files of these weights in the folder of others."""
    directory = directory_on(path.parents[1])
    directory.identity = B
    theirs = path.parents[1] / directory._lookup.digest(B).hex()
    shutil.copytree(path.parent, theirs)
    assert restored(directory, CHAIN) == 0
    assert directory.disk.counters.corrupt == 2


def folder_instead(path: Path, rng: np.random.Generator) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: list[tuple[Damage, int]] = [
    *((flip, 60), (truncate, 20), (lengthen, 4), (delete, 4), (rename, 6)),
    *((exchange, 1), (mix_data, 2), (other_identity, 1), (folder_instead, 2)),
]


@pytest.mark.parametrize(("damage", "rounds"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damage_gives_what_was_written_or_a_miss(tmp_path: Path, damage: Damage, rounds: int) -> None:
    """Before the folder is opened, and while its files are known and open."""
    filled(tmp_path / "whole")
    rng = np.random.default_rng(len(damage.__name__))
    misses = 0
    for round_ in range(rounds):
        folder = tmp_path / f"kv-{round_}"
        shutil.copytree(tmp_path / "whole", folder)
        directory = directory_on(folder)
        if round_ % 2:
            assert restored(directory, CHAIN) == 32
        victims = files(folder)
        damage(victims[int(rng.integers(len(victims)))], rng)
        for tokens in (CHAIN, [*CHAIN[:8], *range(50, 62)]):
            misses += restored(directory, tokens) < len(tokens)
        restored(directory, CHAIN)
        insert(directory, CHAIN)
        assert directory.migrate(CHAIN, DEVICE, DISK, keep=True) in range(33)
        assert restored(directory, CHAIN) == 32
        directory.close()
    if damage in (truncate, delete, flip):
        assert misses


def test_the_bound_holds_and_the_oldest_file_goes(tmp_path: Path) -> None:
    clock = Clock()
    directory = make_directory(disk=make_disk(tmp_path, 3, clock=clock), clock=clock)
    for i in range(5):
        insert(directory, [i] * 4)
        directory.migrate([i] * 4, DEVICE, DISK)
        clock.now += 20
        restored(directory, [0] * 4)  # stays young
    assert sum(f.stat().st_size for f in files(tmp_path)) <= directory.disk.stats().capacity_bytes
    assert [restored(directory, [i] * 4) for i in range(5)] == [4, 0, 0, 4, 4]
    assert directory.disk.counters.evicted == 2
    insert(directory, CHAIN)
    insert(directory, list(range(100, 300)))
    assert directory.migrate(list(range(100, 300)), DEVICE, DISK) == 0  # larger than the whole
    assert directory.disk.counters.full == 50
    directory.close()


def test_a_long_chain_takes_several_files(tmp_path: Path) -> None:
    tokens = list(range(4 * (MAX_BLOCKS + 5)))
    directory = directory_on(tmp_path)
    insert(directory, tokens)
    directory.close()
    assert len(files(tmp_path)) == 2
    assert restored(directory_on(tmp_path), tokens) == len(tokens)


def test_a_finished_session_is_named_so(tmp_path: Path) -> None:
    directory = directory_on(tmp_path)
    insert(directory, CHAIN, kind=Kind.WAITING)
    directory.migrate(CHAIN, DEVICE, DISK)
    directory.finish(CHAIN)
    assert [path.stem[-1] for path in files(tmp_path)] == [str(int(Kind.FINISHED))]
    assert restored(directory, CHAIN) == 32
    assert restored(directory_on(tmp_path), CHAIN) == 32


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_writes_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    filled(tmp_path)
    directory = directory_on(tmp_path)

    def refuse(self: Shelf, run: object, header: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Shelf, "_write", refuse)
    for i in range(3):
        insert(directory, [90 + i] * 8)
        assert directory.migrate([90 + i] * 8, DEVICE, DISK) == 0
    stats = directory.stats()[1]
    assert stats.counters.errors == (1 if number == errno.EROFS else 3)
    assert os.strerror(number) in stats.note
    assert restored(directory, CHAIN) == 32
    assert not list(tmp_path.glob("*/.tmp-*"))


def test_a_folder_that_cannot_be_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    directory = directory_on(tmp_path / "file" / "kv")
    insert(directory, CHAIN)
    assert directory.migrate(CHAIN, DEVICE, DISK) == 0
    assert restored(directory, CHAIN) == 32
    assert "Not a directory" in directory.stats()[1].note
    directory.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this system mounts nothing")
    try:
        directory = directory_on(folder)
        for i in range(30):
            insert(directory, [i] * 12)
            directory.migrate([i] * 12, DEVICE, DISK)
        assert 0 < directory.disk.counters.errors < 30
        assert sum(restored(directory, [i] * 12) == 12 for i in range(30)) > 3
        assert not list(folder.glob("*/.tmp-*"))
        directory.close()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_folder_removed_while_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    filled(folder)
    directory = directory_on(folder)
    assert restored(directory, CHAIN) == 32
    shutil.rmtree(folder)
    assert restored(directory, [*CHAIN[:8], *range(50, 62)]) <= 20
    insert(directory, CHAIN)
    directory.migrate(CHAIN, DEVICE, DISK)
    assert restored(directory, CHAIN) == 32
    directory.close()


def test_two_processes_fill_one_folder_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed while it writes; what it left half done is removed when it is old enough."""
    monkeypatch.setattr(disk_module, "REFRESH_S", 0.0)
    code = (
        f"import sys, itertools; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from pathlib import Path\nfrom kv_cases import *\n"
        f"directory = make_directory(disk=make_disk(Path({str(tmp_path)!r}), 12))\n"
        "print('go', flush=True)\nfor i in itertools.count():\n"
        "    tokens = [i % 9, int(sys.argv[1]), 0, 0] * 2\n"
        "    insert(directory, tokens); directory.migrate(tokens, 'device', 'disk')\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "go\n"
    directory = directory_on(tmp_path, 12)
    bound = directory.disk.stats().capacity_bytes
    found, deadline = 0, time.monotonic() + 1.0
    while time.monotonic() < deadline:
        found += restored(directory, [int(time.monotonic() * 100) % 9, 1, 0, 0] * 2)
        sizes = []
        for path in tmp_path.glob("*/*"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:
                continue
        assert sum(sizes) <= bound
    for writer in writers:
        writer.kill()
        writer.wait(timeout=60)
    assert found > 0
    assert directory.disk.counters.corrupt == 0
    (tmp_path / directory._lookup.digest(A).hex() / ".tmp-left").write_bytes(b"half")
    monkeypatch.setattr(shelf_module, "_ABANDONED_S", -1.0)
    insert(directory, [77] * 8)
    assert directory.migrate([77] * 8, DEVICE, DISK) == 8
    assert not list(tmp_path.glob("*/.tmp-*"))
    directory.close()
