"""The suite: what a ratio means, what is written, what fell, and what a failing module costs."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import peers, plot, report, suite
from benchmarks.report import Row

positive = st.floats(1e-3, 1e6)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return report.RESULTS


def speed(ratio: float) -> Row:
    return report.against("speed", "tok/s", headrace=ratio, peer=1.0, peer_name="peer", target=1.0)


@given(ours=positive, theirs=positive, target=positive)
def test_more_than_one_is_better_in_either_direction(ours: float, theirs: float, target: float):
    sides = {"headrace": ours, "peer": theirs, "peer_name": "peer", "target": target}
    rate = report.against("rate", "tok/s", **sides)
    time = report.against("time", "s", **sides, better="lower")
    assert rate.ratio == pytest.approx(ours / theirs)
    assert time.ratio == pytest.approx(theirs / ours)
    assert rate.met == (rate.ratio >= target)
    assert time.met == (time.ratio >= target)


@given(value=positive, bound=positive)
def test_without_a_peer_more_than_one_says_that_the_bound_is_kept(value: float, bound: float):
    at_most = report.within("time", "s", headrace=value, target=bound)
    at_least = report.within("share", "share", headrace=value, target=bound, better="higher")
    assert at_most.met == (value <= bound)
    assert at_least.met == (value >= bound)
    assert at_most.met == (at_most.ratio >= 1)
    assert at_least.met == (at_least.ratio >= 1)


def test_nothing_at_all_is_within_any_bound():
    row = report.within("stop", "share", headrace=0.0, target=0.03)
    assert row.met
    assert row.headrace == 0.0
    assert row.ratio == pytest.approx(1e6)


def test_the_share_is_that_of_what_is_possible():
    row = report.within(
        "x", "GFLOP/s", headrace=210.0, target=1.0, better="higher", limit=300.0, limit_name="l"
    )
    assert row.share == pytest.approx(0.7)
    row = report.within("x", "s", headrace=2.0, target=1.0, limit=0.5, limit_name="l")
    assert row.share == pytest.approx(0.25)


def test_a_row_is_read_as_it_was_written(results: Path):
    row = report.against(
        "x", "s", headrace=1.0, peer=2.0, peer_name="p", target=1.5, better="lower", details={"all": [1.0]}
    )
    report.write("one", row)
    assert [file.name for file in results.iterdir()] == ["one.json"]
    found = report.read("one")
    assert found is not None
    assert found.details.pop("machine") == report.machine()
    assert found == row


def test_what_is_no_row_is_not_read(results: Path):
    assert report.read("missing") is None
    results.mkdir()
    (results / "other.json").write_text('{"ratio": 2.0}', encoding="utf-8")
    assert report.read("other") is None


@pytest.mark.parametrize("text", ["/home/someone/model", "model=/root/x", "see '/tmp/a.log'"])
def test_a_path_is_never_written(results: Path, text: str):
    row = report.yardstick("x", "GB/s", value=1.0, details={"settings": [{"model": text}]})
    with pytest.raises(ValueError, match="absolute path"):
        report.write("one", row)
    assert not results.exists()


@pytest.mark.parametrize("text", ["tok/s", "GFLOP/s", "examples/addition.toml", "1/2", "a / b"])
def test_a_unit_is_no_path(text: str):
    report.write("one", report.yardstick(text, "GB/s", value=1.0))


def test_a_number_that_is_none_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        report.write("one", report.yardstick("x", "GB/s", value=float("nan")))
    assert report.read("one") is None


def test_only_ratios_that_fell_by_more_than_a_tenth_are_named():
    now = {"same": speed(1.0), "less": speed(0.91), "fell": speed(0.89), "new": speed(0.1)}
    now["yardstick"] = report.yardstick("x", "GB/s", value=1.0)
    before = {"same": 1.0, "less": 1.0, "fell": 1.0, "new": None, "yardstick": 1.0, "not run": 9.0}
    assert suite.fallen(before, now) == ["fell: ratio 0.89, committed 1.00"]


def test_a_ratio_is_compared_with_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "REPOSITORY", tmp_path)
    assert suite.committed("one") is None
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    file = results / "one.json"
    file.write_text('{"ratio": 2.0}', encoding="utf-8")
    (results / "none.json").write_text('{"ratio": null}', encoding="utf-8")

    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    assert suite.committed("one") is None
    git("add", ".")
    git("commit", "--message", "results")
    file.write_text('{"ratio": 1.0}', encoding="utf-8")
    git("add", ".")
    assert suite.committed("one") == 2.0
    assert suite.committed("none") is None
    assert suite.committed("two") is None


def module(name: str, *rows: str, failing: bool = False) -> ModuleType:
    made = ModuleType(name)
    made.asked = []

    def measure(wanted):
        made.asked.append(list(wanted))
        if failing:
            raise peers.PeerError("its peer is not there")
        return {row: speed(2.0) for row in wanted}

    made.ROWS, made.measure = rows, measure
    return made


def test_a_module_measures_its_wanted_rows_in_one_session_and_a_failing_one_costs_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(report, "busy_cores", lambda: 0.0)
    first, broken, last = (
        module("first", "a", "b", "c"),
        module("broken", "d", failing=True),
        module("last", "e"),
    )
    rows = {"a": first, "b": first, "c": first, "d": broken, "e": last}
    measured, failures = suite.run(rows, ["c", "d", "a", "e"])
    assert first.asked == [["c", "a"]]
    assert failures == ["d: its peer is not there"]
    assert sorted(measured) == ["a", "c", "e"]
    written = report.read("e")
    assert written is not None
    assert written.ratio == measured["e"].ratio
    assert report.read("d") is None


def test_what_others_took_stands_in_the_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(report, "busy_cores", lambda: 1.5)
    measured, _ = suite.run({"a": module("first", "a")}, ["a"])
    assert measured["a"].details["cores_of_others"] == 1.5
    assert "other processes use 1.5 cores" in capsys.readouterr().out


def test_a_busy_core_is_seen():
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert report.busy_cores(0.5) > 0.2
    finally:
        spin.kill()
        spin.wait()


def test_an_unknown_row_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert suite.main(["generate_65"]) == 2
    assert "there is no row generate_65; there are gemm_peak, " in capsys.readouterr().err


def test_every_module_names_its_rows_and_none_imports_torch():
    code = "import sys; from benchmarks import suite; print(*suite.load()); assert 'torch' not in sys.modules"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=suite.REPOSITORY,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert {"gemm_peak", "bandwidth", "generate_64", "rollouts_int8", "trl"} <= set(found.stdout.split())


def test_the_table_shows_both_sides_the_target_and_the_limit():
    from rich.console import Console

    rows = {
        "a": report.against(
            "rollouts",
            "tok/s",
            headrace=1234.5,
            peer=617.25,
            peer_name="vLLM",
            target=1.7,
            limit=2469.0,
            limit_name="GEMM peak",
        ),
        "b": report.within("first token", "s", headrace=7.0, target=6.0),
        "c": report.yardstick("reading memory", "GB/s", value=33.25),
    }
    console = Console(width=suite.WIDTH)
    with console.capture() as shown:
        console.print(suite.table(rows))
    text = shown.get()
    for part in ("1,234 tok/s", "617 tok/s", "vLLM", "2.00", "1.70 x", "met", "GEMM peak", "50%"):
        assert part in text
    for part in ("7 s", "6 s", "0.86", "missed", "33.2 GB/s"):
        assert part in text


def test_the_same_rows_give_the_same_picture(results: Path):
    rows = {
        "slow": speed(0.5),
        "quick": speed(2.0),
        "bound": report.within("x", "s", headrace=1.0, target=2.0),
        "yardstick": report.yardstick("reading memory", "GB/s", value=33.0),
    }
    path = plot.draw(rows)
    first = path.read_bytes()
    assert path == results / "summary.svg"
    assert plot.draw(rows).read_bytes() == first
    assert plot.draw({"quick": speed(2.0)}).read_bytes() != first
    assert json.dumps(str(results))[1:-1].encode() not in first
