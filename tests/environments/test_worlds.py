"""Episodes in real worker processes: what one of them does, or its loss, costs that episode at most."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from world_cases import begin, collect, contents, say, talk, write_worlds

from headrace.config import EnvironmentConfig
from headrace.environments import EnvironmentPool, Observation, WorldReply, crew, held_episodes
from headrace.environments.held_episodes import MAX_MOVES
from headrace.errors import EnvironmentSetupError, RunError

MakePool = Callable[..., EnvironmentPool]


@pytest.fixture(scope="module")
def world_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_worlds(tmp_path_factory.mktemp("worlds"))


@pytest.fixture
def make_pool(world_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    monkeypatch.setattr(held_episodes, "GRACE_S", 0.4)
    pools = []

    def make(name: str, *, options: dict[str, Any] | None = None, **settings: Any) -> EnvironmentPool:
        config = EnvironmentConfig(
            name=f"{world_file}:{name}",
            options={"folder": str(tmp_path)} if options is None else options,
            **{"timeout_s": 20.0} | settings,
        )
        pool = EnvironmentPool(config, 0, output=subprocess.DEVNULL)
        pools.append(pool)
        pool.start()
        return pool

    yield make
    for pool in pools:
        pool.close()
    assert not psutil.Process().children(recursive=True)


@pytest.fixture
def notes(tmp_path: Path) -> Callable[[], list[str]]:
    path = tmp_path / "notes"
    return lambda: path.read_text().splitlines() if path.exists() else []


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pid_of(pool: EnvironmentPool, key: str) -> int:
    reply = talk(pool, **{key: "pid"})[key]
    assert reply.error is None
    return int(reply.info["pid"])


def kill_worker(pool: EnvironmentPool, pid: int) -> None:
    """Kill a worker, and wait until the pool has noticed."""
    pool.take_reports()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: bool(pool.take_reports()))


def test_an_episode_from_reset_to_done(make_pool: MakePool, notes: Callable[[], list[str]]) -> None:
    pool = make_pool("Sum")
    assert pool.multi_turn
    assert pool.check(test_tasks=4)["split"] == "train"
    assert pool.test_tasks(2) == [{"n": 0, "split": "test"}, {"n": 1, "split": "test"}]
    assert pool.observe({"n": 5}) == Observation([{"role": "user", "content": "5"}])
    assert begin(pool, "a") == {
        "a": WorldReply("a", 0.0, None, Observation([{"role": "user", "content": "1"}]), done=False)
    }
    reply = talk(pool, a="four")["a"]
    assert (contents([reply]), reply.reward, reply.done) == (["5"], 1.0, False)
    assert talk(pool, a="done") == {"a": WorldReply("a", 5.0, None, None, True, {"total": 5})}
    with pytest.raises(ValueError, match="no episode 'a' is live"):
        pool.step("a", say("more"))
    eventually(lambda: "closed 1 at 5" in notes())
    assert pool.take_reports() == []
    assert pool.poll() == pool.wait(10.0) == []
    assert begin(pool, "a")["a"].error is None  # the key is free again


def test_every_episode_has_its_own_instance_and_they_share_a_worker(make_pool: MakePool) -> None:
    pool = make_pool("Sum", options={"option": []})
    keys = [f"e{i}" for i in range(20)]
    begin(pool, *keys)
    assert len({pid_of(pool, key) for key in keys[:3]}) == 1
    assert talk(pool, e0="live")["e0"].reward == 20.0
    talk(pool, **{key: "x" * i for i, key in enumerate(keys)})
    replies = talk(pool, **dict.fromkeys(keys, ""))
    assert contents(replies[key] for key in keys) == [str(1 + i) for i in range(20)]
    assert contents(talk(pool, e1="option").values()) == ["1"]  # options are not shared between instances


def test_workers_share_the_episodes(make_pool: MakePool) -> None:
    pool = make_pool("Sum", workers=2)
    begin(pool, *"abcd")
    pids = [pid_of(pool, key) for key in "abcd"]
    assert sorted(map(pids.count, set(pids))) == [2, 2]


def test_an_async_wait_does_not_hold_up_the_others(make_pool: MakePool) -> None:
    pool = make_pool("Async")
    keys = [f"e{i}" for i in range(10)]
    begin(pool, "slow", *keys)
    pool.step("slow", say("wait 1"))
    began = time.monotonic()
    for _ in range(3):
        for key in keys:
            pool.step(key, say("wait 0.05"))
        replies: list[WorldReply] = []
        while len(replies) < len(keys):
            replies += pool.wait(5.0)
        assert all(reply.error is None for reply in replies)
    assert time.monotonic() - began < 1.0  # one after another they would take 1.5 s
    assert list(collect(pool)) == ["slow"]


@pytest.mark.parametrize(
    ("name", "word", "error"),
    [
        ("Sum", "raise", "step(action) raised ZeroDivisionError: not today ({file}:"),
        ("Sum", "sys.exit", "step(action) raised SystemExit: leaving ({file}:"),
        ("Async", "sys.exit", "step(action) raised SystemExit: leaving ({file}:"),
        ("Async", "cancel", "step(action) raised CancelledError ({file}:"),
        ("Sum", "nothing", "step(action) returned None; return a Step"),
        ("Sum", "nan", "step(action) returned nan (float), not a finite number"),
        ("Sum", "silent", "step(action) returned a step that is not done and has no observation"),
        ("Tools", "other", "step(action) returned other tools than reset(task)"),
    ],
)
def test_a_failure_ends_one_episode_and_closes_it(
    make_pool: MakePool, notes: Callable[[], list[str]], world_file: Path, name: str, word: str, error: str
) -> None:
    pool = make_pool(name)
    begin(pool, "bad", "good", n=3)
    replies = talk(pool, bad=word, good="x")
    assert replies["bad"].reward is None
    assert replies["bad"].done
    assert error.format(file=world_file) in (replies["bad"].error or "")
    assert "\n" not in (replies["bad"].error or "")
    assert replies["good"].error is None
    with pytest.raises(ValueError, match="no episode 'bad' is live"):
        pool.step("bad", say("x"))
    if name != "Tools":
        eventually(lambda: notes() == ["closed 3 at 3"])
    assert talk(pool, good="y")["good"].error is None


def test_tools_are_told_once_and_messages_come_back_whole(make_pool: MakePool) -> None:
    pool = make_pool("Tools")
    first = begin(pool, "a")["a"].observation
    assert first is not None
    assert first.tools[0]["function"]["name"] == "add"
    reply = talk(pool, a="x")["a"]
    assert reply.observation == Observation(
        [{"role": "tool", "content": '{"role": "assistant", "content": "x"}'}]
    )


def test_an_async_step_past_its_time_fails_alone(make_pool: MakePool, notes: Callable[[], list[str]]) -> None:
    pool = make_pool("Async", timeout_s=0.5)
    begin(pool, "late", "stubborn", "good", n=3)
    pid = pid_of(pool, "good")
    replies = talk(pool, late="wait 30", stubborn="stubborn", good="wait 0.2")
    for key in ("late", "stubborn"):
        assert replies[key].error == "step(action) gave nothing within 0.5 s (environment.timeout_s)"
    assert replies["good"].error is None
    assert pid_of(pool, "good") == pid  # the worker lives on
    eventually(lambda: notes()[:2] == ["left 3", "closed 3 at 3"])


@pytest.mark.parametrize(
    ("name", "word"), [("Sum", "hang"), ("Sum", "exit"), ("Saved", "hold the interpreter"), ("Saved", "exit")]
)
def test_the_others_of_a_lost_worker_go_on_in_another(
    make_pool: MakePool, notes: Callable[[], list[str]], name: str, word: str
) -> None:
    pool = make_pool(name, timeout_s=0.5)
    begin(pool, "a", "b", "bad", n=2)
    talk(pool, a="xx", b="yyy")
    talk(pool, a="xx")
    pid = pid_of(pool, "a")
    pool.step("bad", say(word))
    pool.step("b", say("z"))  # waits behind it in the same worker
    replies = collect(pool)
    ended = (
        "ended its worker, which exited with status 3"
        if word == "exit"
        else "blocked its worker for more than 0.5 s"
    )
    assert (replies["bad"].error or "").startswith(f"step(action) {ended}")
    assert contents([replies["b"]]) == ["6"]
    reply = talk(pool, a="x")["a"]
    assert contents([reply]) == ["7"]
    assert pid_of(pool, "a") != pid
    assert pool.take_reports() == ["a worker was lost; episodes that go on in the one that replaces it: 2"]
    assert sorted(set(notes())) == (["reset 2", "restored 2"] if name == "Saved" else [])
    with pytest.raises(ValueError, match="no episode 'bad' is live"):
        pool.step("bad", say("x"))


def test_the_last_words_of_a_worker_are_heard(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker began before it died fails, also if its death shows first when something is sent to it."""
    pool = make_pool("Sum")
    begin(pool, "a", "bad")
    receive, deaf = crew.Crew._receive, [True]
    monkeypatch.setattr(crew.Crew, "_receive", lambda self, slot: deaf or receive(self, slot))
    pool.step("bad", say("exit"))
    time.sleep(0.3)
    monkeypatch.setattr(crew.WorkerProcess, "exited", False)
    pool.step("a", say("x"))
    time.sleep(0.1)
    monkeypatch.undo()
    deaf.clear()
    replies = collect(pool)
    assert "step(action) ended its worker" in (replies["bad"].error or "")
    assert contents([replies["a"]]) == ["2"]
    assert pool.take_reports() == ["a worker was lost; episodes that go on in the one that replaces it: 1"]


def test_a_reset_that_hangs_fails_alone(make_pool: MakePool) -> None:
    pool = make_pool("Sum", timeout_s=0.5)
    pool.reset("bad", {"n": 1, "do": "hang"})
    pool.reset("good", {"n": 2})
    replies = collect(pool)
    assert "reset(task) blocked its worker" in (replies["bad"].error or "")
    assert contents([replies["good"]]) == ["2"]


def test_a_world_that_goes_another_way_when_it_is_told_again_fails(make_pool: MakePool) -> None:
    pool = make_pool("Sum")
    begin(pool, "a", "b")
    talk(pool, a="random", b="x")
    kill_worker(pool, pid_of(pool, "b"))
    assert contents(talk(pool, b="x").values()) == ["3"]
    assert pool.pending == 0  # nothing was asked of a, so nothing is said yet
    error = talk(pool, a="x")["a"].error or ""
    assert "told again it went another way: the observation of step(action) of turn 1 is" in error
    assert "snapshot and restore" in error
    begin(pool, "a")


def test_an_episode_loses_its_worker_a_bounded_number_of_times(make_pool: MakePool) -> None:
    pool = make_pool("Sum")
    begin(pool, "a", "guide")
    for _ in range(MAX_MOVES):
        pid = pid_of(pool, "guide")  # this one comes further each time, and may go on
        kill_worker(pool, pid)
    kill_worker(pool, pid_of(pool, "guide"))
    error = talk(pool, a="x")["a"].error or ""
    assert f"the episode lost its worker {MAX_MOVES + 1} times" in error
    assert "killed by signal 9" in error
    assert talk(pool, guide="x")["guide"].error is None


def test_an_attempt_that_kills_its_worker_when_told_again_ends(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("Sum")
    (tmp_path / "once").touch()
    begin(pool, "a", "b")
    talk(pool, a="once")
    (tmp_path / "once").unlink()  # from now on the same word ends the worker
    pid = pid_of(pool, "b")
    kill_worker(pool, pid)
    assert talk(pool, b="x")["b"].error is None
    error = talk(pool, a="x")["a"].error or ""
    assert error.startswith(
        "putting a lost episode back in its place ended its worker, which exited with status 3"
    )


def test_drop_closes_and_says_nothing_more(make_pool: MakePool, notes: Callable[[], list[str]]) -> None:
    pool = make_pool("Async", workers=1, episodes_per_worker=1)
    begin(pool, "a", n=1)
    pool.step("a", say("wait 30"))
    pool.reset("b", {"n": 2})  # waits for the place
    pool.reset("c", {"n": 3})
    assert pool.wait(0.2) == []
    pool.drop("b")
    pool.drop("a")
    pool.drop("never begun")
    assert pool.pending == 1
    assert list(collect(pool)) == ["c"]
    assert notes() == ["left 1", "closed 1 at 1"]  # close comes after what it cancels has cleaned up
    pool.drop("c")
    pool.reset("c", {"n": 4})
    assert contents(collect(pool).values()) == ["4"]


def test_a_reply_that_nobody_took_is_dropped_too(make_pool: MakePool) -> None:
    pool = make_pool("Sum")
    pool.reset("a", {"n": 1})
    time.sleep(0.3)
    pool.drop("a")
    assert pool.poll() == []
    assert pool.pending == 0


def test_places_are_bounded_and_given_in_order(make_pool: MakePool) -> None:
    pool = make_pool("Sum", episodes_per_worker=2)
    for n, key in enumerate("abcde"):
        pool.reset(key, {"n": n})
    time.sleep(0.3)
    assert [reply.key for reply in pool.poll()] == ["a", "b"]
    assert talk_only(pool, "a", "done").reward == 0.0
    assert [reply.key for reply in pool.wait(5.0)] == ["c"]
    pool.drop("b")
    assert [reply.key for reply in pool.wait(5.0)] == ["d"]
    assert pool.pending == 1


def talk_only(pool: EnvironmentPool, key: str, text: str) -> WorldReply:
    """The reply to one action, while others are pending."""
    pool.step(key, say(text))
    reply = pool.wait(5.0)[0]
    assert reply.key == key
    return reply


def test_the_places_are_told(make_pool: MakePool) -> None:
    pool = make_pool("Sum", workers=2, episodes_per_worker=2)
    assert (pool.places, pool.free_places) == (4, 4)
    begin(pool, *"abc")
    assert pool.free_places == 1
    for key in "def":
        pool.reset(key, {"n": 1})  # the last two wait, and nothing is free until they are gone
    assert (pool.places, pool.free_places) == (4, 0)
    pool.drop("f")
    pool.drop("e")
    assert pool.free_places == 0
    collect(pool)
    talk(pool, a="done", b="raise")
    assert pool.free_places == 2
    with EnvironmentPool(EnvironmentConfig(name="arithmetic"), 0) as single:
        assert (single.places, single.free_places) == (None, None)


def test_an_episode_has_a_time_in_all(make_pool: MakePool, notes: Callable[[], list[str]]) -> None:
    pool = make_pool("Async", episode_timeout_s=1.0, episodes_per_worker=1)
    began = time.monotonic()
    begin(pool, "a", n=1)
    assert talk(pool, a="wait 0.3")["a"].error is None
    time.sleep(0.8)  # the policy's time is not the world's
    reply = talk(pool, a="wait 0.1")["a"]
    assert reply.error is None
    assert 0.1 <= reply.seconds < 0.6
    pool.step("a", say("wait 5"))
    replies = collect(pool)
    assert time.monotonic() - began < 4
    assert replies["a"].error == "the episode's world took 1 s in all (environment.episode_timeout_s)"
    eventually(lambda: "closed 1 at 9" in notes())
    assert begin(pool, "c")["c"].error is None  # the place is free


def test_waiting_for_a_place_is_not_the_worlds_time(make_pool: MakePool) -> None:
    pool = make_pool("Sum", episode_timeout_s=0.6, episodes_per_worker=1)
    begin(pool, "a")
    pool.reset("b", {"n": 2})
    assert pool.wait(1.0) == []
    pool.drop("a")
    reply = collect(pool)["b"]
    assert contents([reply]) == ["2"]
    assert reply.seconds < 0.5
    assert contents(talk(pool, b="x").values()) == ["3"]


def test_the_time_before_reset_is_called_is_not_the_worlds(make_pool: MakePool) -> None:
    pool = make_pool("Sum", episode_timeout_s=0.7)
    for n in range(5):
        pool.reset(n, {"n": n, "sleep": 0.3})  # one after another
    replies = collect(pool)
    assert [reply.error for reply in replies.values()] == [None] * 5
    assert all(0.2 < reply.seconds < 0.6 for reply in replies.values())


def test_waiting_for_another_worker_is_not_the_worlds_time(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("SlowStart", episode_timeout_s=0.7, options={"folder": str(tmp_path)})
    begin(pool, "idle", "asked", "bad")
    (tmp_path / "slow").touch()
    began = time.monotonic()
    pool.step("bad", say("exit"))
    pool.step("asked", say("x"))
    assert (pool.wait(5.0)[0].error or "").startswith("step(action) ended its worker")
    pool.step("idle", say("xx"))
    replies = collect(pool)
    assert time.monotonic() - began > 1.0
    assert contents([replies["asked"], replies["idle"]]) == ["2", "3"]
    assert all(reply.seconds < 0.6 for reply in replies.values())
    assert contents(talk(pool, asked="x", idle="x").values()) == ["3", "4"]


def test_what_was_used_before_a_worker_was_lost_still_counts(make_pool: MakePool) -> None:
    pool = make_pool("Async", episode_timeout_s=0.6)
    begin(pool, "a")
    assert talk(pool, a="wait 0.4")["a"].error is None
    kill_worker(pool, pid_of(pool, "a"))
    pool.step("a", say("wait 5"))
    began = time.monotonic()
    assert "took 0.6 s in all" in (collect(pool)["a"].error or "")
    assert time.monotonic() - began < 4


def test_a_try_without_a_free_place_does_not_wait(make_pool: MakePool) -> None:
    pool = make_pool("Sum", episodes_per_worker=1)
    begin(pool, "a")
    with pytest.raises(RunError, match="all 1 places for episodes are taken"):
        pool.observe({"n": 5})
    pool.drop("a")
    assert pool.observe({"n": 5}).messages[0]["content"] == "5"


@pytest.mark.parametrize(
    ("close", "report"), [("raise", "close() raised OSError: stuck"), ("hang", "close() blocked")]
)
def test_a_failing_close_is_reported_and_costs_nothing(make_pool: MakePool, close: str, report: str) -> None:
    pool = make_pool("Sum", timeout_s=0.5)
    begin(pool, "a", "b")
    begin(pool, "bad", close=close)
    assert talk(pool, bad="done")["bad"].reward == 1.0
    reports: list[str] = []
    eventually(lambda: bool(reports.extend(pool.take_reports()) or reports))
    assert reports[0].startswith(f"an episode's {report}")
    assert contents(talk(pool, a="x").values()) == ["2"]


@pytest.mark.parametrize("name", ["Sum", "Saved", "Async"])
def test_resume_goes_on_where_another_pool_was(
    make_pool: MakePool, notes: Callable[[], list[str]], name: str
) -> None:
    first = make_pool(name)
    replies = {key: [reply] for key, reply in begin(first, "idle", "asked", "new").items()}
    actions = {"idle": [say("xx")], "asked": [say("yyy")], "new": []}
    for key, reply in talk(first, idle="xx", asked="yyy").items():
        replies[key].append(reply)
    first.close()
    actions["asked"].append(say("z"))
    # Out of a journal: plain data.
    replies = {key: [WorldReply.from_dict(r.to_dict()) for r in made] for key, made in replies.items()}

    second = make_pool(name)
    for key in ("idle", "asked", "new"):
        second.resume(key, {"n": 1}, actions[key], replies[key], replies[key][-1].snapshot)
    second.resume("begun", {"n": 9}, [], [], None)
    assert second.pending == 2
    answered = collect(second)
    assert contents(answered[key] for key in ("asked", "begun")) == ["5", "9"]
    assert contents(talk(second, idle="x", asked="", new="x").values()) == ["4", "5", "2"]
    assert ("restored 1" in notes()) == (name == "Saved")
    with pytest.raises(ValueError, match="'idle' is already live"):
        second.resume("idle", {"n": 1}, [], replies["new"], None)
    with pytest.raises(ValueError, match="1 actions and 3 replies"):
        second.resume("more", {"n": 1}, [say("x")], [*replies["idle"], replies["idle"][0]], None)


def test_a_resume_that_cannot_be_is_told_when_something_is_asked(make_pool: MakePool) -> None:
    pool = make_pool("Sum")
    wrong = WorldReply("a", 0.0, None, Observation([{"role": "user", "content": "7"}]), done=False)
    pool.resume("idle", {"n": 1}, [], [wrong])
    pool.resume("asked", {"n": 1}, [say("x")], [wrong])
    replies = collect(pool)
    assert list(replies) == ["asked"]
    assert "the observation of reset(task) is" in (replies["asked"].error or "")
    assert pool.wait(0.2) == []
    assert "the observation of reset(task) is" in (talk(pool, idle="x")["idle"].error or "")


def test_the_time_before_a_resume_counts(make_pool: MakePool) -> None:
    pool = make_pool("Async", episode_timeout_s=100.0)
    spent = WorldReply("a", 0.0, None, Observation([{"role": "user", "content": "1"}]), False, seconds=99.8)
    pool.resume("a", {"n": 1}, [say("wait 5")], [spent])
    began = time.monotonic()
    assert "took 100 s in all" in (collect(pool)["a"].error or "")
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NoStep", {}, "has no method 'step'; an environment has tasks and reward or"),
        ("HalfSaved", {}, "has snapshot but no restore; it needs both, or neither"),
        (
            "BadReset",
            {},
            "reset(task) returned an observation whose messages[0]['content'] is None; use a string",
        ),
        ("BadReset", {}, ", on task {'n': "),
        ("BadClose", {}, "close() raised OSError: stuck"),
        (
            "BadSnapshot",
            {},
            "snapshot() returned data that JSON cannot give back unchanged: snapshot['file'] is",
        ),
        ("NoneSnapshot", {}, "snapshot() returned None"),
        ("FailsInConstructor", {}, "RuntimeError: no key"),
    ],
)
def test_what_is_wrong_is_one_line_before_a_run(
    make_pool: MakePool, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentSetupError) as error:
        make_pool(name, options=options).check()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_constructor_that_raises_later_fails_its_episode(make_pool: MakePool) -> None:
    pool = make_pool("FailsInConstructor", options={"after": 1})
    replies = begin(pool, "a", "b")
    assert replies["a"].error is None  # the instance that the worker was checked with
    assert "RuntimeError: no key" in (replies["b"].error or "")


def test_each_form_refuses_the_requests_of_the_other(make_pool: MakePool) -> None:
    pool = make_pool("Sum")
    with pytest.raises(ValueError, match="has the conversation form"):
        pool.submit("a", {}, "")
    with EnvironmentPool(EnvironmentConfig(name="arithmetic"), 0) as single:
        assert not single.multi_turn
        with pytest.raises(ValueError, match=r"has the tasks \+ reward form"):
            single.reset("a", {})
    with pytest.raises(RunError, match="not running"):
        single.train_task(0)


@pytest.mark.parametrize(("name", "seed"), [("Sum", 0), ("Saved", 1), ("Async", 2)])
def test_whatever_happens_every_request_gets_one_right_reply(
    make_pool: MakePool, name: str, seed: int
) -> None:
    """Random episodes that grow, end, fail and are dropped, while workers are killed."""
    rng = random.Random(seed)
    pool = make_pool(name, workers=2, episodes_per_worker=4, timeout_s=5.0)
    expected: dict[int, tuple[str, float | None]] = {}  # what is asked now
    totals: dict[int, int] = {}
    seen: set[int] = set()
    counts = {"answered": 0, "lost": 0, "dropped": 0, "killed": 0}
    key = 0

    def take(replies: list[WorldReply]) -> None:
        for reply in replies:
            kind, value = expected.pop(reply.key)
            if reply.error is not None:
                assert kind == "fail" or "worker" in reply.error, reply.error
                counts["lost"] += kind != "fail"
                del totals[reply.key]
            else:
                assert kind != "fail"
                counts["answered"] += 1
                assert reply.done == (kind == "done")
                seen.update(reply.info.values() if not reply.done else [])
                if reply.done:
                    assert reply.reward == value
                    del totals[reply.key]
                else:
                    assert contents([reply]) == [str(value)]

    deadline = time.monotonic() + 15
    while counts["answered"] < 150 and time.monotonic() < deadline:
        idle = [k for k in totals if k not in expected]
        choice = rng.random()
        if choice < 0.05:
            while seen and counts["killed"] < 6:  # one that has spoken: three failed starts would end the run
                pid = seen.pop()
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
                    counts["killed"] += 1
                    break
        elif choice < 0.3 and len(totals) < 12:
            key += 1
            totals[key] = key
            expected[key] = ("reset", key)
            pool.reset(key, {"n": key})
        elif choice < 0.35 and totals:
            dropped = rng.choice(list(totals))
            pool.drop(dropped)
            del totals[dropped]
            expected.pop(dropped, None)
            counts["dropped"] += 1
        elif idle:
            which = rng.choice(idle)
            word = rng.choices(["x", "xx", "done", "raise"], [6, 6, 2, 1])[0]
            totals[which] += len(word) if word.startswith("x") else 0
            kind = {"done": "done", "raise": "fail"}.get(word, "step")
            expected[which] = (kind, totals[which])
            pool.step(which, say(word))
        take(pool.wait(0.01) if rng.random() < 0.3 else pool.poll())
    deadline = time.monotonic() + 20
    while totals and time.monotonic() < deadline:
        for which in [k for k in totals if k not in expected]:
            pool.drop(which)  # those that wait need their places
            del totals[which]
        take(pool.wait(1.0))
    assert not totals
    assert not expected
    assert pool.pending == 0
    keys = [f"after {n}" for n in range(8)]
    assert all(reply.error is None for reply in begin(pool, *keys).values())  # no place was lost
    assert counts["answered"] >= 150
    assert counts["killed"] > 0
    assert counts["lost"] <= 8 * counts["killed"]
