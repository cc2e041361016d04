"""User code in real worker processes: whatever it does costs one request and nothing else."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import EnvironmentConfig
from headrace.environments import EnvironmentPool, WorldReply
from headrace.environments.messages import Ready, Reward, Setup
from headrace.environments.process import WorkerProcess
from headrace.errors import EnvironmentFailure, EnvironmentSetupError, RunError, UserError

TASK_FILE = '''
import asyncio, ctypes, itertools, math, os, signal, subprocess, sys, time


class Counting:
    """Task n; the completion says what the reward does."""

    def __init__(self, folder="", first=0):
        self.folder = folder
        self.first = first
        print("building", flush=True)

    def tasks(self, split):
        return ({"prompt": f"{split} {n}", "n": n} for n in itertools.count(self.first))

    def reward(self, task, completion):
        if completion == "hang":
            while True:
                pass
        if completion == "hold the interpreter":
            return ctypes.PyDLL(None).sleep(600)
        if completion == "sleep":
            time.sleep(0.3)
        if completion == "exit":
            os._exit(3)
        if completion == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "sys.exit":
            sys.exit("leaving")
        if completion == "raise":
            raise ZeroDivisionError("not\\ntoday")
        if completion == "text":
            return "x"
        if completion == "none":
            return None
        if completion == "nan":
            return math.nan
        if completion == "print":
            print("chatter " * 200_000)
            os.write(1, b"raw" * 1000)
        if completion == "input":
            return len(sys.stdin.read())
        if completion == "child":
            return subprocess.Popen(["sleep", "600"]).pid
        if completion == "hash":
            return hash("text")
        if completion == "pid":
            return os.getpid()
        if completion == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if completion == "modules":
            return any(name in sys.modules for name in ("torch", "numpy", "pydantic"))
        return task["n"]


class Async:
    async def tasks(self, split):
        for n in range(3):
            await asyncio.sleep(0)
            yield {"prompt": f"{split} {n}", "n": n}

    async def reward(self, task, completion):
        await asyncio.sleep(10 if completion == "hang" else 0)
        return float(completion == str(task["n"]))


class Shuffled(Counting):
    def tasks(self, split):
        return itertools.islice(super().tasks(split), 50)


class RaisesInTasks(Counting):
    def tasks(self, split):
        yield from itertools.islice(super().tasks(split), self.first)
        raise LookupError("no data")


class HangsInTasks(Counting):
    def tasks(self, split):
        yield {"prompt": "0"}
        time.sleep(600)


class FailsOnce(Counting):
    def tasks(self, split):
        mark = os.path.join(self.folder, "failed")
        if not os.path.exists(mark):
            open(mark, "w").close()
            raise OSError("flaky")
        return super().tasks(split)


class SlowTasks(Counting):
    def tasks(self, split):
        for n in range(16):
            time.sleep(0.1)
            yield {"prompt": f"{split} {n}", "n": n}


class NoTestTasks(Counting):
    def tasks(self, split):
        return [] if split == "test" else super().tasks(split)


class KeepsALambda(Counting):
    def tasks(self, split):
        return [{"prompt": "?", "check": lambda answer: True}]


class RaisesInReward(Counting):
    def reward(self, task, completion):
        return int(completion)


class RaisesInConstructor(Counting):
    def __init__(self):
        raise RuntimeError("no key")


class ExitsInConstructor(Counting):
    def __init__(self):
        os._exit(7)


class BuildsOnce(Counting):
    """Cannot be built again once the file `stop` exists."""

    def __init__(self, folder):
        super().__init__(folder)
        if os.path.exists(os.path.join(folder, "stop")):
            raise RuntimeError("stopped")
'''


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "pool_task.py"
    path.write_text(TASK_FILE)
    return path


MakePool = Callable[..., EnvironmentPool]


@pytest.fixture
def make_pool(task_file: Path) -> Iterator[MakePool]:
    pools = []

    def make(
        name: str,
        *,
        workers: int = 1,
        timeout_s: float = 20.0,
        seed: int = 0,
        start: bool = True,
        **options: Any,
    ) -> EnvironmentPool:
        config = EnvironmentConfig(
            name=f"{task_file}:{name}", options=options, workers=workers, timeout_s=timeout_s
        )
        pool = EnvironmentPool(config, seed, output=subprocess.DEVNULL)
        pools.append(pool)
        if start:
            pool.start()
        return pool

    yield make
    for pool in pools:
        pool.close()
    assert not children()


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def assert_gone(pids: list[int]) -> None:
    """Every process has ended within five seconds (whether or not init has reaped it)."""

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def line_of(task_file: Path, text: str) -> str:
    lines = task_file.read_text().splitlines()
    return f"({task_file}:{next(n for n, line in enumerate(lines, 1) if text in line)})"


def rewards(pool: EnvironmentPool, *completions: str, n: int = 7) -> dict[Any, WorldReply]:
    """Submit one reward per completion and wait for all."""
    for completion in completions:
        pool.submit(completion, {"prompt": "?", "n": n}, completion)
    replies: dict[Any, WorldReply] = {}
    deadline = time.monotonic() + 30
    while pool.pending and time.monotonic() < deadline:
        replies.update((reply.key, reply) for reply in pool.wait(1.0))
    assert set(replies) == set(completions)
    return replies


def test_the_built_in_environment_end_to_end() -> None:
    with EnvironmentPool(EnvironmentConfig(name="arithmetic", workers=2), seed=0) as pool:
        task = pool.check(test_tasks=4)
        assert pool.train_task(0) == task
        assert len(pool.test_tasks(1000)) == 16
        assert pool.test_tasks(2) == pool.test_tasks(1000)[:2]
        assert pool.test_tasks(0) == []
        for index in range(100):
            pool.submit(index, task := pool.train_task(index), f"so {task['answer']}" if index % 2 else "no")
        replies = []
        while pool.pending:
            replies += pool.wait(10.0)
        assert {reply.key: reply.reward for reply in replies} == {i: float(i % 2) for i in range(100)}
        assert all(reply.error is None for reply in replies)
        assert pool.poll() == pool.wait(10.0) == []
        assert pool.oldest_pending_s == 0.0


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("exit", "reward(task, completion) ended its worker, which exited with status 3"),
        ("kill", "reward(task, completion) ended its worker, which was killed by signal 9 (Killed)"),
        ("sys.exit", "reward(task, completion) raised SystemExit: leaving {line}"),
        ("raise", "reward(task, completion) raised ZeroDivisionError: not today {line}"),
        ("text", "reward(task, completion) returned 'x' (str), not a number"),
        ("none", "reward(task, completion) returned None, not a number"),
        ("nan", "reward(task, completion) returned nan (float), not a finite number"),
    ],
)
def test_a_failure_costs_one_request(
    make_pool: MakePool, task_file: Path, completion: str, error: str
) -> None:
    pool = make_pool("Counting")
    replies = rewards(pool, "before", completion, "after")
    lines = {"raise": "raise Zero", "sys.exit": 'sys.exit("leaving")'}
    line = line_of(task_file, lines.get(completion, "class"))
    assert replies[completion] == WorldReply(completion, None, error.format(line=line))
    assert replies["before"] == WorldReply("before", 7.0, None)
    assert replies["after"] == WorldReply("after", 7.0, None)


@pytest.mark.parametrize("hang", ["hang", "hold the interpreter"])
def test_a_reward_that_never_returns_is_killed(make_pool: MakePool, hang: str) -> None:
    pool = make_pool("Counting", timeout_s=1.0)
    began = time.monotonic()
    replies = rewards(pool, "sleep", hang, "after")
    assert time.monotonic() - began < 10
    assert replies[hang].reward is None
    assert replies[hang].error is not None
    assert "nothing within 1 s (environment.timeout_s)" in replies[hang].error
    assert (replies["sleep"].reward, replies["after"].reward) == (7.0, 7.0)


def test_the_timeout_runs_from_the_start_of_a_reward_not_from_its_submission(make_pool: MakePool) -> None:
    pool = make_pool("Counting", timeout_s=1.0)
    for key in range(5):
        pool.submit(key, {"prompt": "?", "n": 1}, "sleep")  # 0.3 s each, 1.5 s in all
    replies = []
    while pool.pending:
        replies += pool.wait(5.0)
    assert [reply.reward for reply in replies] == [1.0] * 5
    assert all(0.3 <= reply.seconds < 0.9 for reply in replies)


def test_a_hanging_reward_does_not_hold_up_other_workers(make_pool: MakePool) -> None:
    pool = make_pool("Counting", workers=2)
    pool.submit("stuck", {"prompt": "?", "n": 1}, "hang")
    for key in range(5):
        pool.submit(key, {"prompt": "?", "n": 1}, "")
    keys: list[Any] = []
    while len(keys) < 5:
        keys += [reply.key for reply in pool.wait(5.0)]
    assert keys == [0, 1, 2, 3, 4]
    assert pool.pending == 1
    assert pool.wait(0.1) == []
    assert 0.1 < pool.oldest_pending_s < 20


def test_user_code_has_no_hand_on_the_protocol(make_pool: MakePool) -> None:
    replies = rewards(make_pool("Counting"), "print", "input", "interrupt", "modules")
    assert replies["print"].reward == replies["interrupt"].reward == 7.0
    assert replies["input"].reward == 0.0
    assert replies["modules"].reward == 0.0  # neither torch nor pydantic is loaded in a worker


def test_text_hashes_alike_in_every_worker(make_pool: MakePool) -> None:
    first, second = (rewards(make_pool("Counting"), "hash")["hash"].reward for _ in range(2))
    assert first == second  # or the order of a set, and with it a task, would differ after a resume


def test_drop_gives_up_queued_and_running_rewards(make_pool: MakePool) -> None:
    pool = make_pool("Counting")
    for completion in ("sleep", "queued", "kept"):
        pool.submit(completion, {"prompt": "?", "n": 1}, completion)
    time.sleep(0.1)
    pool.drop("sleep")
    pool.drop("queued")
    pool.drop("never submitted")
    pool.submit("sleep", {"prompt": "?", "n": 2}, "")
    assert pool.pending == 2
    replies = []
    while pool.pending:
        replies += pool.wait(5.0)
    assert replies == [WorldReply("kept", 1.0, None), WorldReply("sleep", 2.0, None)]


def test_a_key_is_pending_once(make_pool: MakePool) -> None:
    pool = make_pool("Counting")
    pool.submit("a", {"prompt": "?", "n": 1}, "")
    with pytest.raises(ValueError, match="already pending"):
        pool.submit("a", {"prompt": "?", "n": 1}, "")


def test_async_environments(make_pool: MakePool) -> None:
    pool = make_pool("Async", timeout_s=1.0)
    assert pool.check()["prompt"].startswith("train ")
    assert [task["n"] for task in pool.test_tasks(5)] == [0, 1, 2]
    assert sorted(pool.train_task(i)["n"] for i in range(3)) == [0, 1, 2]
    replies = rewards(pool, "7", "hang", "8")
    assert (replies["7"].reward, replies["8"].reward) == (1.0, 0.0)
    assert replies["hang"].error is not None


def test_the_order_of_tasks_survives_restarts(make_pool: MakePool) -> None:
    first = make_pool("Shuffled", seed=3)
    order = [first.train_task(i)["n"] for i in range(120)]
    assert sorted(order[:50]) == sorted(order[50:100]) == list(range(50))
    assert order[:50] != order[50:100]
    assert [first.train_task(i)["n"] for i in (0, 60, 10)] == [order[0], order[60], order[10]]
    first.close()
    resumed = make_pool("Shuffled", seed=3)
    assert [resumed.train_task(i)["n"] for i in range(70, 120)] == order[70:]
    assert make_pool("Shuffled", seed=4).train_task(0) != resumed.train_task(0) or order[:1] == [0]
    assert [task["prompt"] for task in resumed.test_tasks(2)] == ["test 0", "test 1"]


def test_slow_tasks_are_no_timeout_as_long_as_they_come(make_pool: MakePool) -> None:
    pool = make_pool("SlowTasks", timeout_s=1.0)  # reading all of them takes 1.6 s
    assert pool.train_task(3)["prompt"].startswith("train")


def test_a_task_source_that_hangs_is_named(make_pool: MakePool) -> None:
    pool = make_pool("HangsInTasks", timeout_s=1.0)
    with pytest.raises(EnvironmentFailure, match=r"tasks\('train'\) for task 0 gave nothing within 1 s"):
        pool.train_task(0)
    assert pool.test_tasks(1) == [{"prompt": "0"}]  # the worker was replaced
    with pytest.raises(EnvironmentFailure, match=r"tasks\('test'\) for 2 tasks gave nothing"):
        pool.test_tasks(2)


def test_a_task_source_that_raises_later_fails_there(make_pool: MakePool, task_file: Path) -> None:
    pool = make_pool("RaisesInTasks", first=12_000)
    assert pool.train_task(0) == {"prompt": "train 12000", "n": 12_000}
    assert pool.train_task(11_999)["n"] == 23_999
    for _ in range(2):
        with pytest.raises(EnvironmentFailure) as error:
            pool.train_task(12_000)
        assert "tasks('train') for task 12000 raised LookupError: no data" in str(error.value)
        assert line_of(task_file, "raise LookupError") in str(error.value)
    assert pool.train_task(11_999)["n"] == 23_999


def test_a_failed_task_can_be_asked_for_again(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("FailsOnce", folder=str(tmp_path))
    with pytest.raises(EnvironmentFailure, match="OSError: flaky"):
        pool.train_task(0)
    assert pool.train_task(0)["n"] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("RaisesInTasks", {}, "tasks('train') for task 0 raised LookupError: no data {raise LookupError}"),
        ("KeepsALambda", {}, "task['check'] is <function"),
        ("NoTestTasks", {}, "tasks('test') is empty"),
        ("RaisesInReward", {}, "reward(task, completion) raised ValueError: invalid literal"),
        ("RaisesInReward", {}, "{return int}, on the first task and completion ''"),
    ],
)
def test_check_says_which_method_failed_and_where(
    make_pool: MakePool, task_file: Path, name: str, options: dict[str, Any], message: str
) -> None:
    pool = make_pool(name, **options)
    if "{" in message:
        text = message[message.index("{") + 1 : message.index("}")]
        message = message.replace("{" + text + "}", line_of(task_file, text))
    with pytest.raises(EnvironmentSetupError) as error:
        pool.check(test_tasks=1)
    assert str(error.value).startswith(f"environment {task_file}:{name}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Countng", {}, "no class 'Countng'; did you mean 'Counting'?"),
        ("Counting", {"frist": 3}, "unknown environment option 'frist'"),
        ("RaisesInConstructor", {}, "RuntimeError: no key"),
        ("ExitsInConstructor", {}, "the worker exited with status 7 while building the environment"),
    ],
)
def test_start_reports_what_is_wrong_and_leaves_nothing(
    make_pool: MakePool, name: str, options: dict[str, Any], message: str
) -> None:
    pool = make_pool(name, workers=2, start=False, **options)
    with pytest.raises(EnvironmentSetupError) as error:
        pool.start()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, UserError)
    assert not children()


def test_a_worker_that_cannot_start_again_ends_the_run(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("BuildsOnce", folder=str(tmp_path))
    (tmp_path / "stop").touch()
    assert rewards(pool, "exit")["exit"].error is not None
    pool.submit("next", {"prompt": "?", "n": 1}, "")
    with pytest.raises(
        RunError, match=r"reward worker 1 failed to start 3 times in a row; .*RuntimeError: stopped"
    ):
        pool.wait(20.0)
    with pytest.raises(RunError, match="3 times in a row"):
        pool.train_task(0)


def test_a_worker_that_dies_while_idle_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool("Counting")
    for _ in range(4):  # more often than a worker may fail to start in a row
        pid = rewards(pool, "pid")["pid"].reward
        assert pid is not None
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    assert rewards(pool, "ok")["ok"].reward == 7.0


def test_close_is_quick_idempotent_and_ends_what_user_code_started(make_pool: MakePool) -> None:
    pool = make_pool("Counting", workers=3)
    child = rewards(pool, "child")["child"].reward
    assert child is not None
    pool.submit("stuck", {"prompt": "?", "n": 1}, "hang")
    time.sleep(0.1)
    assert len(children()) == 5  # a task worker, three reward workers, and a worker's own child
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 2.0
    pool.close()
    assert not children()
    assert_gone([int(child)])
    with pytest.raises(RunError, match="not running"):
        pool.train_task(0)


@pytest.mark.parametrize("completion", ["", "hang", "child"])
def test_a_killed_parent_leaves_no_orphans(task_file: Path, completion: str) -> None:
    script = f"""
        import time
        from headrace.config import EnvironmentConfig
        from headrace.environments import EnvironmentPool
        pool = EnvironmentPool(EnvironmentConfig(name={str(task_file) + ":Counting"!r}, workers=2), 0)
        pool.start()
        pool.submit(0, {{"prompt": "?", "n": 1}}, {completion!r})
        pool.wait(0.5)
        print("ready", flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    started = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    assert len(started) == 3 + (completion == "child")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert_gone(started)


def test_a_worker_ends_with_its_connection_and_takes_along_what_it_started(task_file: Path) -> None:
    setup = Setup(f"{task_file}:Counting", {}, seed=0, timeout_s=10.0)
    worker = WorkerProcess(setup, output=subprocess.DEVNULL)
    assert worker.connection.recv() == Ready()
    worker.connection.send(Reward({"prompt": "?", "n": 1}, "child"))
    child = int(worker.connection.recv().value)
    worker.connection.close()
    assert_gone([worker.pid, child])
    assert worker.describe_exit() == "was killed by signal 9 (Killed)"


def test_an_orphan_that_holds_the_interpreter_ends_when_its_time_is_over() -> None:
    code = """
        import ctypes
        from headrace.environments import worker
        worker.SELF_DESTRUCT_AFTER_S = 0.2
        worker._self_destruct_in(0.1)
        ctypes.PyDLL(None).sleep(30)
    """
    began = time.monotonic()
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL)
    assert process.returncode == 1
    assert time.monotonic() - began < 15


def test_importing_the_room_needs_no_torch_and_no_settings() -> None:
    code = "import sys, headrace.environments, headrace.environments.worker; print([m for m in sys.modules])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("torch", "transformers", "numpy", "pydantic", "reasoning_gym"):
        assert f"'{name}'" not in modules
