"""Host memory shared by processes: writers that die, places that change while they are read, damage anywhere."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from kv_cases import BLOCK, BLOCK_BYTES, LAYOUT, A, insert, make_directory, make_host, restored, rows_of

from headrace.kernels.copying import Loading
from headrace.state.directory import Directory
from headrace.state.eviction import Kind
from headrace.state.report import kv_report
from headrace.state.tiers import segment as segment_module
from headrace.state.tiers import shared as shared_module
from headrace.state.tiers.base import DEVICE, HOST
from headrace.state.tiers.segment import Segment, remove_leftovers, segment_path

CHAIN = list(range(32))
SUPPORT = Path(__file__).parents[1] / "support"


def directory_on(folder: Path, places: int = 8) -> Directory:
    return make_directory(host=make_host(folder, places))


def fill(directory: Directory, tokens: list[int] = CHAIN) -> None:
    insert(directory, tokens)
    assert directory.migrate(tokens, DEVICE, HOST) == len(tokens)


def child(folder: Path, body: str) -> subprocess.Popen[str]:
    code = (
        f"import sys, os, time; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from pathlib import Path\nfrom kv_cases import *\n"
        f"directory = make_directory(host=make_host(Path({str(folder)!r})))\nhost = directory.host\n{body}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_processes_share_blocks_both_ways_and_the_last_one_removes_them(tmp_path: Path) -> None:
    ours = directory_on(tmp_path)
    other = child(
        tmp_path,
        "insert(directory, range(16)); directory.migrate(range(16), 'device', 'host'); print('ready', flush=True)\n"
        "sys.stdin.readline(); print(restored(directory, [9] * 16), flush=True)\n"
        "sys.stdin.readline(); directory.close()\n",
    )
    assert says(other) == "ready"
    assert restored(ours, CHAIN) == 16
    assert (tmp_path / "headrace-kv-test").stat().st_mode & 0o777 == 0o600
    fill(ours, [9] * 16)
    other.stdin.write("\n")
    other.stdin.flush()
    assert says(other) == "16"
    ours.close()
    assert segment_path("test", tmp_path).exists()
    other.communicate("\n", timeout=60)
    assert other.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_in_the_middle_frees_its_lock_and_its_places(tmp_path: Path) -> None:
    ours = directory_on(tmp_path)
    fill(ours, CHAIN[:8])
    writer = child(
        tmp_path,
        "import headrace.state.tiers.shared as shared\nstore = shared.store\n"
        "def hang(*args):\n    store(*args); print('halfway', flush=True); time.sleep(600)\n"
        "shared.store = hang\ninsert(directory, range(100, 116))\n"
        "directory.migrate(range(100, 116), 'device', 'host')\n",
    )
    assert says(writer) == "halfway"
    fill_late = [50, 51, 52, 53]
    insert(ours, fill_late)
    assert ours.migrate(fill_late, DEVICE, HOST) == 0  # somebody writes
    assert ours.host.counters.late == 1
    writer.kill()
    writer.wait(timeout=60)
    assert restored(ours, list(range(100, 116))) == 0
    assert ours.host.stats().blocks == 2
    fill(ours, list(range(200, 224)))  # six more: the places of the dead are used again
    assert ours.host.stats().blocks == 8
    assert restored(ours, CHAIN[:8]) == 8
    assert restored(ours, list(range(200, 224))) == 24
    ours.close()
    assert list(tmp_path.iterdir()) == []


def test_writers_killed_at_random_leave_nothing_wrong(tmp_path: Path) -> None:
    ours = directory_on(tmp_path)
    rng = np.random.default_rng(0)
    body = (
        "import itertools\nprint('go', flush=True)\n"
        "for i in itertools.count():\n"
        "    tokens = [i % 7] * 12\n    insert(directory, tokens); directory.migrate(tokens, 'device', 'host')\n"
    )
    writers = [child(tmp_path, body) for _ in range(2)]
    assert [says(writer) for writer in writers] == ["go", "go"]
    deadline = time.monotonic() + 0.3 + rng.random() * 0.2
    found = 0
    while time.monotonic() < deadline:
        found += restored(ours, [int(rng.integers(7))] * 12)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=60)
    assert found > 0
    assert ours.host.counters.corrupt == 0
    fill(ours, [int(rng.integers(7))] * 12)
    ours.close()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from headrace.state.tiers.segment import Segment, Shape, segment_path\n"
        f"segment = Segment.attach(segment_path('x', Path({str(tmp_path)!r})), Shape(1, 4096, 4, 8192, 12288))\n"
        "print('there', flush=True); time.sleep(600)"
    )
    dead = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert says(dead) == "there"
    assert remove_leftovers(tmp_path) == 0
    dead.kill()
    dead.wait(timeout=60)
    (tmp_path / "other-file").write_bytes(b"mine")
    assert remove_leftovers(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["other-file"]


def test_a_place_that_changes_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = directory_on(tmp_path, 2), directory_on(tmp_path, 2)
    fill(ours, CHAIN[:8])
    load = Loading.load

    def overwrite(self: Loading, *args: object, **kwargs: object) -> object:
        result = load(self, *args, **kwargs)  # type: ignore[arg-type]
        monkeypatch.setattr(Loading, "load", load)
        insert(other, [7] * 8)
        assert other.migrate([7] * 8, DEVICE, HOST) == 8
        return result

    monkeypatch.setattr(Loading, "load", overwrite)
    assert restored(ours, CHAIN) == 0
    assert ours.host.counters.corrupt == 0
    assert restored(ours, [7] * 8) == 8
    other.close()
    ours.close()


def test_any_flipped_bit_is_a_miss_or_harmless(tmp_path: Path) -> None:
    """In data, table, log and header; afterwards the tier works on."""
    rng = np.random.default_rng(1)
    caught = 0
    for round_ in range(150):
        directory = directory_on(tmp_path)
        host = directory.host
        fill(directory)
        memory = np.frombuffer(host.segment.map, dtype=np.uint8)
        if round_ % 2:
            at = int(rng.integers(host.segment.shape.data_at))  # table and header are small: hit them often
        else:
            at = host.segment.shape.data_at + int(rng.integers(8)) * host.segment.shape.place_bytes
            at += int(rng.integers(BLOCK_BYTES))
        memory[at] ^= 1 << int(rng.integers(8))
        del memory
        caught += restored(directory, CHAIN) < len(CHAIN)
        insert(directory, CHAIN)
        directory.migrate(CHAIN, DEVICE, HOST)
        assert restored(directory, [*CHAIN[:12], 5, 5, 5, 5]) <= 12
        directory.evict(HOST, 3 * BLOCK_BYTES)
        restored(directory, CHAIN)
        fill_again = [9] * 8
        insert(directory, fill_again)
        directory.migrate(fill_again, DEVICE, HOST)
        restored(directory, fill_again)
        directory.close()
    assert caught > 60


def test_damage_is_not_carried_to_the_disk(tmp_path: Path) -> None:
    from kv_cases import make_disk

    for field in ("data", "tokens", "parent", "fingerprint"):
        directory = make_directory(host=make_host(tmp_path), disk=make_disk(tmp_path / f"kv-{field}"))
        fill(directory)
        table = directory.host.table
        if field == "data":
            place = directory.host._index[directory._lookup.keys(A, CHAIN)[3].key]
            table._bytes[table.data_at(place) + 11] ^= 4
        else:
            place = directory.host._index[directory._lookup.keys(A, CHAIN)[3].key]
            name = bytearray(table.entries["name"][place].tobytes())
            name[{"tokens": 48, "parent": 33, "fingerprint": 0}[field]] ^= 1
            if field == "fingerprint":
                table.entries["fingerprint"][place] = np.void(b"x" * 16)
            else:
                table.entries["name"][place] = np.void(bytes(name))
        directory.evict(HOST, 1 << 30)
        directory.disk.flush()
        assert restored(directory, CHAIN) == 12
        changed = [*CHAIN[:12], CHAIN[12] ^ 1, *CHAIN[13:]]
        assert restored(directory, changed) == 12
        directory.close()


def test_memory_cut_short_or_removed_while_in_use(tmp_path: Path) -> None:
    directory = directory_on(tmp_path)
    fill(directory)
    segment_path("test", tmp_path).unlink()
    assert restored(directory, CHAIN) == 32  # nobody new will find it, those attached go on
    os.truncate(directory.host.segment.file, 100)
    assert restored(directory, CHAIN) == 0
    insert(directory, CHAIN)
    directory.migrate(CHAIN, DEVICE, HOST)
    assert restored(directory, CHAIN) == 32  # from the device
    stats = directory.stats()[1]
    assert (stats.blocks, stats.note) == (0, "its file was cut short")
    directory.close()


@pytest.mark.parametrize("damage", ["header", "short", "empty"])
def test_a_damaged_one_that_somebody_holds_is_refused_and_a_leftover_replaced(
    tmp_path: Path, damage: str
) -> None:
    holder = directory_on(tmp_path)
    path = segment_path("test", tmp_path)
    match damage:
        case "header":
            holder.host.segment.map[9] ^= 1
        case "short":
            os.truncate(path, 8192)
        case "empty":
            os.truncate(path, 0)
    refused = make_host(tmp_path)
    assert refused.segment is None
    assert "headrace-kv-test" in refused.note
    unusable = make_directory(host=refused)
    insert(unusable, CHAIN)
    assert unusable.migrate(CHAIN, DEVICE, HOST) == 0
    assert restored(unusable, CHAIN) == 32
    unusable.close()
    holder.close()
    path.write_bytes(b"left")
    fresh = directory_on(tmp_path)
    fill(fresh)
    assert restored(fresh, CHAIN) == 32
    fresh.close()


def test_full_memory_keeps_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Segment, places: int) -> None:
        if places > 16:
            raise OSError(28, "No space left on device")
        reserve(self, places)

    reserve = Segment.reserve
    monkeypatch.setattr(segment_module.Segment, "reserve", refuse)
    directory = make_directory(host=make_host(tmp_path, 40))
    chain = list(range(80))
    insert(directory, chain)
    assert directory.migrate(chain, DEVICE, HOST) == 64
    assert directory.stats()[1].note == "memory is full: No space left on device"
    assert directory.host.counters.full == 4
    assert restored(directory, chain) == 80
    directory.close()


def test_no_folder_for_memory_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    host = make_host(tmp_path / "file")
    assert host.segment is None
    assert host.note


def test_what_does_not_fit_a_place_is_left_out(tmp_path: Path) -> None:
    small = shared_module.SharedTier("test", 64 * 4096, 64, BLOCK - 1, folder=tmp_path)
    directory = make_directory(host=small)
    insert(directory, CHAIN)
    assert directory.migrate(CHAIN, DEVICE, HOST) == 0
    assert small.counters.full == 8
    directory.close()


def test_the_report_counts_by_identity_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "memory_folder", lambda: tmp_path)
    directory = directory_on(tmp_path)
    insert(directory, CHAIN[:8], kind=Kind.WAITING)
    directory.migrate(CHAIN[:8], DEVICE, HOST)
    (report,) = kv_report("test", tmp_path / "no-disk")
    assert (report["tier"], report["blocks"], report["bytes"]) == (HOST, 2, 2 * BLOCK_BYTES)
    assert report["kinds"] == {"shared": 0, "waiting": 2, "finished": 0}
    directory.close()
    assert kv_report("test", tmp_path) == []


@pytest.mark.parametrize("many", [1, 3])
def test_a_reader_learns_of_what_others_stored(tmp_path: Path, many: int) -> None:
    """From the log, or from the table when the log has come round."""
    ours, other = directory_on(tmp_path), directory_on(tmp_path)
    for i in range(many):
        fill(other, [i + 40] * 32)
    assert restored(ours, [many + 39] * 32) == 32
    other.close()
    ours.close()


def test_the_fixture_itself_has_true_rows() -> None:
    a, b = rows_of([1, 2, 3]), rows_of([1, 2, 3], A._replace(adapter="x"))
    assert not any(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert LAYOUT.row_bytes == (2 * 3 + 5) * 8
