"""The doctor finds what is there, says how to mend what is not, and neither prints nor changes anything."""

import importlib.metadata as metadata
import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from headrace import doctor
from headrace.doctor import Finding, report


def by_name() -> dict[str, Finding]:
    findings = report()
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def test_report_is_complete_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    findings = by_name()
    assert {
        "python", "headrace", "torch", "transformers", "cpu", "threads", "devices", "memory", "cache folder",
        "cached models", "free disk",
    } <= set(findings)  # fmt: skip
    assert findings["torch"].value == metadata.version("torch")
    assert str(doctor.available_cores()) in findings["cpu"].value
    assert findings["devices"].value.startswith("cpu")
    assert capfd.readouterr() == ("", "")


def test_what_is_wrong_comes_with_a_mend() -> None:
    assert all(finding.mend for finding in report() if not finding.ok)


def test_threads_are_compared_with_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(doctor, "available_cores", lambda: torch.get_num_threads())
    assert by_name()["threads"].ok
    monkeypatch.setattr(doctor, "available_cores", lambda: torch.get_num_threads() + 1)
    finding = by_name()["threads"]
    assert not finding.ok
    assert "OMP_NUM_THREADS" in (finding.mend or "")


def test_missing_and_outdated_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "no-such-package>=1",
        "packaging<1",
        "numpy>=1",
        "nothing-here; extra == 'fancy'",
        "numpy; extra == 'plain'",
        "pydantic; python_version > '3'",
        "not-for-this-system; sys_platform == 'nowhere'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    findings = {finding.name: finding for finding in doctor._software()}
    assert findings["no-such-package"].mend == 'pip install "no-such-package>=1"'
    assert not findings["packaging"].ok
    assert metadata.version("packaging") in findings["packaging"].value
    assert "numpy" not in findings
    assert "not-for-this-system" not in findings
    assert [r.name for r in doctor._requirements("fancy")] == ["nothing-here"]
    assert doctor._requirement(Requirement("nothing-here")) == Finding(
        "nothing-here", "not installed", False, 'pip install "nothing-here"'
    )


def test_cache_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.models import resolve

    cache = tmp_path / "not" / "yet"
    monkeypatch.setenv("HEADRACE_CACHE", str(cache))
    findings = by_name()
    assert (findings["cache folder"].value, findings["cached models"].value) == (str(cache), "none yet")
    assert findings["cached models"].mend == "headrace pull smollm2-135m"
    assert not cache.exists()
    resolve("tiny-random")
    assert "tiny-random" in by_name()["cached models"].value


def test_cache_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(file / "cache"))
    finding = by_name()["cache folder"]
    assert not finding.ok
    assert "HEADRACE_CACHE" in (finding.mend or "")


def test_low_memory_and_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LOW_MEMORY", 1 << 60)
    monkeypatch.setattr(doctor, "_LOW_DISK", 1 << 60)
    findings = by_name()
    assert not findings["memory"].ok
    assert not findings["free disk"].ok


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="needs Linux's list of CPU features")
def test_cpu_features_are_those_of_linux() -> None:
    features = by_name()["cpu"].value.split(", ")[1].split()
    flags = Path("/proc/cpuinfo").read_text().split()
    assert all(feature in flags for feature in features[1:])
    assert ("avx512_bf16" in features) == ("avx512_bf16" in flags)
