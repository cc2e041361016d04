"""Workers: one answer per request, whatever a library prints; bounded waits; no process is left over."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import peers

SCRIPT = """
import serving
# isort: split
import os, subprocess, sys, time

settings = serving.settings()
print("a library says hello")
if settings.get("die"):
    sys.exit("no such model")

def answer(request):
    print("and something on each request", flush=True)
    if request.get("hang"):
        time.sleep(60)
    if request.get("die"):
        raise RuntimeError("out of luck")
    return {"sum": sum(request["numbers"]), "asked": sys.stdin.read()}

serving.serve({"pid": os.getpid(), "scale": settings["scale"], "variable": os.environ.get("VARIABLE")}, answer)
"""


@pytest.fixture
def start(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")

    def start(settings: dict, start_timeout_s: float = 60.0) -> peers.Worker:
        return peers.Worker(
            "the adder",
            [sys.executable, str(script)],
            settings,
            start_timeout_s=start_timeout_s,
            environment={"VARIABLE": "set", "PYTHONPATH": str(peers.SCRIPTS)},
        )

    return start


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_worker_answers_each_request_and_what_is_printed_is_no_answer(start):
    with start({"scale": 3}) as worker:
        assert (worker.ready["scale"], worker.ready["variable"]) == (3, "set")
        for numbers in ([1, 2], list(range(20_000))):  # also more than a pipe holds
            assert worker.ask({"numbers": numbers}, timeout_s=60) == {"sum": sum(numbers), "asked": ""}
    assert gone(worker.ready["pid"])


def test_a_worker_that_fails_shows_why(start, capsys: pytest.CaptureFixture[str]):
    with (
        start({"scale": 1}) as worker,
        pytest.raises(peers.PeerError, match="the adder: ended with exit code 1"),
    ):
        worker.ask({"die": True}, timeout_s=60)
    assert "RuntimeError: out of luck" in capsys.readouterr().err
    with pytest.raises(peers.PeerError, match="the adder: ended with exit code 1"):
        start({"die": True})
    assert "no such model" in capsys.readouterr().err


def test_a_worker_that_does_not_answer_is_stopped(start):
    with start({"scale": 1}) as worker:
        with pytest.raises(peers.PeerError, match="the adder: no answer after 0 s"):
            worker.ask({"hang": True}, timeout_s=0.3)
        assert worker._process.wait(timeout=30) != 0
    with pytest.raises(peers.PeerError, match="the adder: no answer after 0 s"):
        start({"scale": 1}, start_timeout_s=0.0)


def test_a_worker_asked_after_its_end_says_so(start):
    with start({"scale": 1}) as worker:
        worker._process.kill()
        worker._process.wait(timeout=30)
        with pytest.raises(peers.PeerError, match="the adder: ended with exit code -9"):
            worker.ask({"numbers": []}, timeout_s=60)
