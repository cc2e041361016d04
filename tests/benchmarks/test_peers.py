"""Peers: a virtual environment is made once and anew when its requirements change; processes are bounded."""

import sys
from pathlib import Path

import pytest

from benchmarks import peers


@pytest.fixture
def benchmarks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "benchmarks"
    (folder / "requirements").mkdir(parents=True)
    monkeypatch.setattr(peers, "BENCHMARKS", folder)
    return folder


def test_a_venv_is_made_once_and_anew_when_its_requirements_change(benchmarks_folder: Path):
    requirements = benchmarks_folder / "requirements" / "peer.txt"
    requirements.write_text("# nothing\n", encoding="utf-8")
    python = peers.ensure_venv("peer")
    witness = benchmarks_folder / "venvs" / "peer" / "witness"
    witness.touch()

    assert peers.ensure_venv("peer") == python
    assert witness.exists()
    assert peers.versions(python, ["pip"])["pip"].replace(".", "").isdigit()

    requirements.write_text("not a requirement\n", encoding="utf-8")
    with pytest.raises(peers.PeerError, match="installing peer: ended with exit code 1"):
        peers.ensure_venv("peer")
    assert not witness.exists()
    assert not (witness.parent / peers.STAMP).exists()


def test_a_process_past_its_deadline_is_stopped():
    with pytest.raises(peers.PeerError, match="sleeper: not done after 0 s"):
        peers.run([sys.executable, "-c", "import time; time.sleep(60)"], what="sleeper", timeout_s=0.2)


def test_a_missing_program_is_one_line():
    with pytest.raises(peers.PeerError, match="ours: headrace-missing is not installed here"):
        peers.run([str(Path(sys.executable).with_name("headrace-missing"))], what="ours", timeout_s=1)


def test_a_process_sees_the_given_variables(tmp_path: Path):
    code = f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(os.environ['OMP_NUM_THREADS'])"
    peers.run([sys.executable, "-c", code], what="reader", timeout_s=60, environment={"OMP_NUM_THREADS": "3"})
    assert (tmp_path / "seen").read_text() == "3"
