"""The tasks of one environment and its rewards or worlds, computed in worker processes.

One process serves tasks; `environment.workers` others serve rewards, or hold the live episodes of conversations.

Invariants
* User code runs in worker processes only, and every call of it has a deadline.
* A request that raises, takes too long or kills its worker fails alone: the worker is replaced and the
  others go on.
* What was asked gets exactly one reply unless it is dropped. A failure is never a reward.
* An episode that waits for a place in a worker waits as long as other episodes hold the places: `free_places` says
  beforehand whether it would, and whoever asks bounds the wait. All other waits have deadlines here.
* `close` leaves no process behind; nor does the death of this process.

The crew's thread and the callers share this object; `_changed` guards it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from headrace.environments.base import Action, Observation
from headrace.environments.crew import Crew, Work
from headrace.environments.jobs import Jobs
from headrace.environments.messages import GetTask, GetTestTasks, Reward, Setup
from headrace.environments.options import shortened
from headrace.environments.reply import WorldReply
from headrace.environments.reward_queue import RewardQueue
from headrace.environments.tasks import WantedTasks
from headrace.environments.worlds import Worlds
from headrace.errors import EnvironmentFailure, EnvironmentSetupError, RunError

if TYPE_CHECKING:
    from headrace.config import EnvironmentConfig

_REPORTS_KEPT = 100


class EnvironmentPool:
    """Tasks of one environment, and the rewards or the worlds that answer to them.

    An environment has one of two forms, which `multi_turn` tells once the pool has started. With `tasks` + `reward`,
    `submit` asks for a reward. With the conversation form, `reset` begins an episode under a key of the caller's,
    `step` asks it for its answer to an action, and so on until a reply is `done` or has an `error`, or until `drop`.
    Replies come from `poll` and `wait`.

    Args:
        config: the environment's name, options, number of workers and limits.
        seed: shuffles the train tasks.
        output: where what the user's code prints goes (a file or descriptor); standard error by default.

    Use it as a context manager, or call `start` and `close`, from one thread. Every method raises RunError
    once a worker failed to start three times in a row.
    """

    def __init__(self, config: EnvironmentConfig, seed: int, output: int | IO[Any] | None = None) -> None:
        self._config = config
        self._changed = threading.Condition()
        self._multi_turn: bool | None = None
        self._closing = False
        self._fatal: Exception | None = None
        setup = Setup(config.name, dict(config.options), seed, config.timeout_s)
        holder = Setup(config.name, dict(config.options), seed, config.timeout_s, holds_episodes=True)
        self._worlds = Worlds(config, self._changed, self._answer, self._report)
        self._crew = Crew(
            [setup] + [holder] * config.workers,
            self._make_work,
            self._worlds.fail_late_and_fill_places,
            self._on_started,
            self._on_error,
            self._report,
            output,
        )
        # A key is in `_pending`, with the time it was asked, until its reply is handed out.
        self._pending: dict[Hashable, float] = {}
        self._replies: deque[WorldReply] = deque()
        self._reports: deque[str] = deque(maxlen=_REPORTS_KEPT)
        self._rewards = RewardQueue(self._answer)
        self._tasks = WantedTasks()

    # Life

    def start(self) -> None:
        """Build the environment in every worker.

        Raises:
            EnvironmentSetupError: it cannot be built.
        """
        self._crew.start()
        try:
            with self._changed:
                self._wait_for(lambda: self._multi_turn is not None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill every worker, within a second. Live episodes are not closed first. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._crew.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def multi_turn(self) -> bool:
        """Whether the environment has the conversation form. Known once the pool has started."""
        if self._multi_turn is None:
            raise RunError("the environment pool is not running")
        return self._multi_turn

    @property
    def places(self) -> int | None:
        """How many episodes can be in workers at once; None, no limit, for an environment of `tasks` + `reward`."""
        return self._worlds.places if self.multi_turn else None

    @property
    def free_places(self) -> int | None:
        """How many episodes more could begin without waiting for another one to end; None as for `places`.

        Those that wait already have the first claim, so this is `places` minus the live ones, and never negative. The
        place of an episode that has just ended may take a moment until its `close` is over.
        """
        return max(0, self._worlds.places - self._worlds.num_live) if self.multi_turn else None

    # Tasks

    def check(self, sample_completion: str = "", test_tasks: int = 0) -> dict[str, Any]:
        """The first train task, once it is known that it can be read and rewarded, or its episode begun and closed.

        Args:
            sample_completion: what to try `reward` on.
            test_tasks: how many held-out tasks to read as well.

        Raises:
            EnvironmentSetupError: which method failed, and how.
        """
        task: dict[str, Any]
        task, error = self._outcome(GetTask(0))
        if error is None and test_tasks:
            _, error = self._outcome(GetTestTasks(test_tasks))
        if error is None and self.multi_turn:
            self.observe(task)
        elif error is None:
            key = object()
            self.submit(key, task, sample_completion)
            reply = self._wait_for_reply(key)
            error = reply.error and f"{reply.error}, on the first task and completion {sample_completion!r}"
        if error is not None:
            raise self._setup_error(error)
        return task

    def observe(self, task: dict[str, Any]) -> Observation:
        """What an episode of `task` begins with. Begins one, closes it, and waits for both. Conversation form only.

        Raises:
            EnvironmentSetupError: which method failed, and how.
            RunError: no place is free, so that this could wait without end.
        """
        if self.free_places == 0:
            raise RunError(
                f"environment {self._config.name}: all {self.places} places for episodes are taken; drop one, or "
                "raise environment.episodes_per_worker"
            )
        key = object()
        self.reset(key, task)
        reply = self._wait_for_reply(key)
        if reply.error is not None:
            raise self._setup_error(f"{reply.error}, on task {shortened(repr(task))}")
        closed: list[str | None] = []
        with self._changed:
            self._worlds.drop(key, closed.append)
            self._crew.wake()
            self._wait_for(lambda: bool(closed))
        if closed[0] is not None:
            raise self._setup_error(f"{closed[0]}, after reset on task {shortened(repr(task))}")
        assert reply.observation is not None
        return reply.observation

    def train_task(self, index: int) -> dict[str, Any]:
        """The train task at place `index`; those that follow are read ahead.

        Raises:
            EnvironmentFailure: the environment raised, gave no valid task, or none in time.
        """
        task: dict[str, Any] = self._value(GetTask(index))
        return task

    def test_tasks(self, count: int) -> list[dict[str, Any]]:
        """The first `count` held-out tasks, or all where there are fewer. Raises as `train_task` does."""
        tasks: list[dict[str, Any]] = self._value(GetTestTasks(count)) if count > 0 else []
        return tasks

    # Requests. Each gets one reply that carries `key`.

    def submit(self, key: Hashable, task: dict[str, Any], completion: str) -> None:
        """Ask for the reward of a completion. `key` must not be pending. `tasks` + `reward` form only."""
        with self._changed:
            self._raise_if_over(multi_turn=False)
            if key in self._pending:
                raise ValueError(f"a reward for {key!r} is already pending")
            self._pending[key] = time.monotonic()
            self._rewards.ask(key, Reward(task, completion))
        self._crew.wake()

    def reset(self, key: Hashable, task: dict[str, Any]) -> None:
        """Begin an episode of `task`; the reply has its first observation. `key` must not be live.

        It waits if none of the `places` is free. That wait has no end of its own; `wait` bounds it for the caller.
        """
        self._ask(key, lambda: self._worlds.reset(key, task))

    def step(self, key: Hashable, action: Action) -> None:
        """Ask a live episode, of which nothing is asked, for its answer to an action.

        If its worker was lost since its last reply and it could not be put back, the reply says so.

        Raises:
            ValueError: no episode is live under `key`, or it is still to answer.
        """
        self._ask(key, lambda: self._worlds.step(key, action))

    def resume(
        self,
        key: Hashable,
        task: dict[str, Any],
        actions: list[Action],
        replies: list[WorldReply],
        snapshot: Any = None,
    ) -> None:
        """Make an episode live that another pool held, where it stood there.

        A new instance gets back `snapshot`; if there is none, or its class has no `restore`, it is reset and told
        `actions` again, and must give the observations and rewards of `replies` again.

        If the last request was not answered, it is asked again and its reply will come. If nothing was asked, no reply
        comes: the next request is the caller's `step`, whose reply says so if the episode could not be put back.

        Args:
            task: the episode's.
            actions: every action that it was asked for, in order.
            replies: the replies it gave: the first to `reset`, then one to each action. One for each action asked and
                one more means that nothing is pending; as many as actions, that the last action is (or `reset`, where
                both are empty). None of them is `done` or has an error.
            snapshot: that of the last reply.

        Raises:
            ValueError: `key` is live, or the numbers of actions and replies do not fit.
        """
        asked = len(actions) == len(replies)
        self._ask(key, lambda: self._worlds.resume(key, task, actions, replies, snapshot), asked)

    def drop(self, key: Hashable) -> None:
        """Give up a reward or an episode, if there is one: no reply of it is handed out any more.

        A reward that is being computed still has its deadline; an episode's instance is closed.
        """
        with self._changed:
            self._pending.pop(key, None)
            self._rewards.drop(key)
            self._replies = deque(reply for reply in self._replies if reply.key != key)
            self._worlds.drop(key)
        self._crew.wake()

    # Replies

    def poll(self) -> list[WorldReply]:
        """The replies that have come in since the last time; does not wait."""
        with self._changed:
            replies = self._hand_out()
            if not replies:
                self._raise_if_over()
            return replies

    def wait(self, timeout_s: float) -> list[WorldReply]:
        """The replies that have come in, after waiting for the first one.

        Empty after `timeout_s` seconds, or at once if none is pending.
        """
        with self._changed:
            self._wait_for(lambda: bool(self._replies) or not self._pending, timeout_s)
            return self._hand_out()

    @property
    def pending(self) -> int:
        """Requests whose replies were not handed out yet."""
        with self._changed:
            return len(self._pending)

    @property
    def oldest_pending_s(self) -> float:
        """Seconds since the oldest pending request; 0 if there is none."""
        with self._changed:
            return max((time.monotonic() - since for since in self._pending.values()), default=0.0)

    def take_reports(self) -> list[str]:
        """Lines about what went wrong since the last time without costing an attempt; at most the last 100.

        Such as a `close` that raised, a lost worker whose episodes go on, or an answer that nobody asked for.
        """
        with self._changed:
            reports = list(self._reports)
            self._reports.clear()
            return reports

    # What callers share; `_changed` is held

    def _ask(self, key: Hashable, ask: Callable[[], None], pending: bool = True) -> None:
        with self._changed:
            self._raise_if_over(multi_turn=True)
            if key in self._pending:
                raise ValueError(f"episode {key!r} is still to answer")
            # Before it is asked: an episode that has failed already answers at once.
            self._pending[key] = time.monotonic()
            try:
                ask()
            except BaseException:
                del self._pending[key]
                raise
            if not pending:
                del self._pending[key]
        self._crew.wake()

    def _answer(self, reply: WorldReply) -> None:
        self._replies.append(reply)

    def _report(self, text: str) -> None:
        with self._changed:  # the crew's thread does not hold it
            self._reports.append(text)

    def _wait_for_reply(self, key: object) -> WorldReply:
        with self._changed:
            self._wait_for(lambda: any(reply.key is key for reply in self._replies))
            reply = next(reply for reply in self._replies if reply.key is key)
            self._replies.remove(reply)
            del self._pending[key]
            return reply

    def _hand_out(self) -> list[WorldReply]:
        replies = list(self._replies)
        self._replies.clear()
        for reply in replies:
            del self._pending[reply.key]
        return replies

    def _raise_if_over(self, multi_turn: bool | None = None) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._closing or self._multi_turn is None:
            raise RunError("the environment pool is not running")
        if multi_turn is not None and multi_turn != self._multi_turn:
            form = "the conversation form" if self._multi_turn else "the tasks + reward form"
            raise ValueError(f"environment {self._config.name} has {form}")

    def _wait_for(self, done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `done()`, or until the pool is over, which raises.

        Without `timeout_s`, what is waited for must have a deadline in the workers.
        """
        timeout_s = None if timeout_s == math.inf else timeout_s
        self._changed.wait_for(lambda: done() or self._closing or self._fatal is not None, timeout_s)
        if not done():
            self._raise_if_over()

    def _value(self, request: GetTask | GetTestTasks) -> Any:
        value, error = self._outcome(request)
        if error is not None:
            raise EnvironmentFailure(f"environment {self._config.name}: {error}")
        return value

    def _outcome(self, request: GetTask | GetTestTasks) -> tuple[Any, str | None]:
        with self._changed:
            self._raise_if_over()
            self._tasks.want(request)
            self._crew.wake()
            self._wait_for(lambda: self._tasks.has(request))
            return self._tasks.pop_outcome(request)

    def _setup_error(self, error: str) -> EnvironmentSetupError:
        return EnvironmentSetupError(f"environment {self._config.name}: {error}")

    # What the crew's thread calls

    def _make_work(self, index: int, multi_turn: bool) -> Work:
        if index == 0:
            return Jobs(self._tasks.next_job, self._config.timeout_s, self._changed)
        if multi_turn:
            return self._worlds.add_worker()
        return Jobs(self._rewards.next_job, self._config.timeout_s, self._changed)

    def _on_started(self, multi_turn: bool) -> None:
        with self._changed:
            self._multi_turn = multi_turn
            self._changed.notify_all()

    def _on_error(self, error: Exception) -> None:
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()
