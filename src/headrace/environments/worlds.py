"""The live episodes of an environment of conversations, and which worker holds each.

Invariants
* What is asked of an episode gets exactly one reply, unless the episode is dropped. An episode whose reply has an
  error, or is done, is over.
* An episode has one place in one worker from its first request to its `Closed`. No worker holds more than
  `episodes_per_worker`.
* When a worker is lost, the episodes whose methods were running fail. The others are put back in the worker that
  replaces it, at most `MAX_MOVES` times between two replies; where that fails, the failure is the reply to what is
  asked next.
* An episode's world takes at most `episode_timeout_s` in all, counted while something is asked of it.

The crew's thread and the pool's callers share this; `changed` guards it, and every method here takes it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, Any

from headrace.environments.base import Action, Step
from headrace.environments.messages import (
    Act,
    Answered,
    Began,
    Close,
    Closed,
    EpisodeRequest,
    Refused,
    Reply,
    Reset,
    Restore,
)
from headrace.environments.reply import WorldReply

if TYPE_CHECKING:
    from headrace.config import EnvironmentConfig

MAX_MOVES = 3
"""How often an episode may lose its worker before it comes any further."""

SENT_AHEAD = 8
"""Requests that a worker may have been sent and not begun, so that a worker that hangs does not fill its socket."""

GRACE_S = 1.0
"""How much longer than a method may take a worker may be silent: it cancels async methods itself."""


@dataclass(slots=True, eq=False)
class _Episode:
    """One episode.

    Attributes:
        steps: what the world answered: to `reset`, then to each action.
        asked_at: when what is asked now was asked.
        used_s: what its world has taken for what was answered.
        home: the work of the worker that holds it; None as long as it waits for a place.
        known: whether the worker that stands there now was told of it.
        in_place: whether its instance there has come as far as `steps`.
        over: whether nothing of it matters any more but its place.
        failure: why it cannot go on, as long as nobody was told.
    """

    number: int
    key: Hashable
    task: dict[str, Any]
    actions: list[Action] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    snapshot: Any = None
    asked_at: float | None = None
    used_s: float = 0.0
    home: HeldEpisodes | None = None
    known: bool = False
    in_place: bool = True
    over: bool = False
    moves: int = 0
    failure: str | None = None


class Worlds:
    """Every live episode.

    Args:
        config: the limits.
        changed: guards all of this; notified by whoever `reply` tells.
        reply: takes a reply, with `changed` held.
        report: takes a line about what went wrong and cost no attempt.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        changed: Condition,
        reply: Callable[[WorldReply], None],
        report: Callable[[str], None],
    ) -> None:
        self.config = config
        self.changed = changed
        self.report = report
        self._reply = reply
        self._live: dict[Hashable, _Episode] = {}
        self._waiting: deque[_Episode] = deque()
        self._workers: list[HeldEpisodes] = []
        self._count = 0
        self._watched: dict[_Episode, Callable[[str | None], None]] = {}

    @property
    def places(self) -> int:
        return self.config.episodes_per_worker * self.config.workers

    def add_worker(self) -> HeldEpisodes:
        """The work of one more worker."""
        with self.changed:
            self._workers.append(HeldEpisodes(self))
            return self._workers[-1]

    # What callers ask

    def reset(self, key: Hashable, task: dict[str, Any]) -> None:
        with self.changed:
            self._ask(self._new(key, task))

    def step(self, key: Hashable, action: Action) -> None:
        with self.changed:
            episode = self._live.get(key)
            if episode is None:
                raise ValueError(f"no episode {key!r} is live; begin one with reset")
            if episode.asked_at is not None:
                raise ValueError(f"episode {key!r} is still to answer")
            episode.actions.append(action)
            self._ask(episode)
            if episode.failure is not None:
                self.fail(episode, episode.failure)
            elif episode.home is not None:
                episode.home.todo.append(episode)

    def resume(
        self,
        key: Hashable,
        task: dict[str, Any],
        actions: list[Action],
        replies: list[WorldReply],
        snapshot: Any,
    ) -> None:
        if not len(replies) - 1 <= len(actions) <= len(replies):
            raise ValueError(
                f"episode {key!r} has {len(actions)} actions and {len(replies)} replies; there is one reply to its "
                "reset and one to each action, and the last one may be missing"
            )
        with self.changed:
            episode = self._new(key, task)
            episode.actions = list(actions)
            episode.steps = [reply.step for reply in replies]
            episode.snapshot = snapshot
            episode.used_s = sum(reply.seconds for reply in replies)
            episode.in_place = not replies
            if len(actions) == len(replies):
                self._ask(episode)

    def drop(self, key: Hashable, when_closed: Callable[[str | None], None] | None = None) -> None:
        """Give an episode up. `when_closed` gets the error of its `close`, or None."""
        with self.changed:
            episode = self._live.get(key)
            if episode is None:
                return
            if when_closed is not None and episode.home is None:
                when_closed(None)
            elif when_closed is not None:
                self._watched[episode] = when_closed
            self._release(episode)

    # What the crew's thread asks

    def assign(self, now: float) -> float:
        """Fail what is over its time, and give places to those that wait. Returns when the next one's time is over."""
        with self.changed:
            limit = self.config.episode_timeout_s
            next_at = math.inf
            for episode in list(self._live.values()):
                if episode.asked_at is None:
                    continue
                ends_at = episode.asked_at + limit - episode.used_s
                if now < ends_at:
                    next_at = min(next_at, ends_at)
                    continue
                lack = f"; it waited for one of the {self.places} places" if episode.home is None else ""
                self.fail(
                    episode,
                    f"the episode's world took {limit:g} s in all (environment.episode_timeout_s){lack}",
                )
            while self._waiting and self._workers:
                worker = min(self._workers, key=lambda worker: len(worker.held))
                if len(worker.held) >= self.config.episodes_per_worker:
                    break
                worker.hold(self._waiting.popleft())
            return next_at

    def answer(self, episode: _Episode, step: Step, snapshot: Any) -> None:
        """Hand out what the world said. `changed` is held, here and below."""
        episode.steps.append(step)
        episode.moves = 0
        episode.snapshot = snapshot
        seconds = self._answered(episode)
        if step.done:
            self._forget(episode)
        self._reply(
            WorldReply(
                episode.key, step.reward, None, step.observation, step.done, step.info, snapshot, seconds
            )
        )

    def fail(self, episode: _Episode, error: str) -> None:
        """Tell why an episode is over, now or, if nothing is asked of it, when something will be."""
        if episode.over:
            return
        if episode.asked_at is None:
            episode.failure = error
        else:
            seconds = self._answered(episode)
            self._reply(WorldReply(episode.key, None, error, seconds=seconds))
            self._forget(episode)
        if episode.home is not None:
            episode.home.give_up(episode)

    def gone(self, episode: _Episode, error: str | None) -> None:
        """An episode's place is free again."""
        episode.home = None
        watcher = self._watched.pop(episode, None)
        if watcher is not None:
            watcher(error)
        elif error is not None:
            self.report(f"an episode's {error}")

    def _new(self, key: Hashable, task: dict[str, Any]) -> _Episode:
        if key in self._live:
            raise ValueError(f"an episode {key!r} is already live")
        self._count += 1
        episode = self._live[key] = _Episode(self._count, key, task)
        self._waiting.append(episode)
        return episode

    def _ask(self, episode: _Episode) -> None:
        episode.asked_at = time.monotonic()

    def _answered(self, episode: _Episode) -> float:
        assert episode.asked_at is not None
        seconds = time.monotonic() - episode.asked_at
        episode.used_s += seconds
        episode.asked_at = None
        return seconds

    def _forget(self, episode: _Episode) -> None:
        episode.over = True
        del self._live[episode.key]
        if episode.home is None and episode in self._waiting:
            self._waiting.remove(episode)

    def _release(self, episode: _Episode) -> None:
        self._forget(episode)
        if episode.home is not None:
            episode.home.give_up(episode)


class HeldEpisodes:
    """The work of one worker: the episodes that have a place in it.

    A worker that has something to do says `Began` before each call of a method, and the end of each. So one that is
    silent for longer than a method may take is blocked.
    """

    def __init__(self, worlds: Worlds) -> None:
        self.held: dict[int, _Episode] = {}
        self.todo: deque[_Episode] = deque()
        self.deadline = math.inf
        self._worlds = worlds
        self._silence_s = worlds.config.timeout_s + GRACE_S
        self._sent: dict[int, EpisodeRequest] = {}
        self._running: dict[int, EpisodeRequest] = {}
        self._closing: set[int] = set()

    def hold(self, episode: _Episode) -> None:
        """Give an episode a place here."""
        episode.home, episode.known = self, False
        self.held[episode.number] = episode
        self.todo.append(episode)

    def give_up(self, episode: _Episode) -> None:
        """Nothing more is wanted of an episode here; it keeps its place until it is closed."""
        if not episode.known:
            self._leave(episode, None)
        elif episode.number not in self._closing:
            self.todo.append(episode)

    def give(self, now: float) -> list[EpisodeRequest]:
        with self._worlds.changed:
            requests: list[EpisodeRequest] = []
            idle = not self._busy
            while self.todo and len(self._sent) < SENT_AHEAD:
                request = self._next(self.todo.popleft())
                if request is not None:
                    requests.append(request)
            if requests and idle:
                self.deadline = now + self._silence_s
            return requests

    def take(self, message: Reply, now: float) -> bool:
        if not isinstance(message, Began | Answered | Refused | Closed):
            return False
        with self._worlds.changed:
            taken = self._take(message)
            if taken:
                self.deadline = now + self._silence_s if self._busy else math.inf
                self._worlds.changed.notify_all()
            return taken

    def lose(self, how: str | None) -> bool:
        with self._worlds.changed:
            running, self._running = self._running, {}
            closing = self._closing
            self._sent, self._closing, self.todo = {}, set(), deque()
            self.deadline = math.inf
            limit = f"{self._worlds.config.timeout_s:g} s (environment.timeout_s)"
            end = (
                f"blocked its worker for more than {limit}, which was killed"
                if how is None
                else f"ended its worker, which {how}"
            )
            together = f" ({len(running)} episodes were being served)" if len(running) > 1 else ""
            moved = 0
            for episode in list(self.held.values()):
                episode.known = False
                if episode.over or episode.failure is not None:
                    called = "close() " + end if episode.number in closing else None
                    self._leave(episode, called)
                elif episode.number in running:
                    self._worlds.fail(episode, f"{running[episode.number]} {end}{together}")
                else:
                    self._move(episode, end)
                    moved += episode.failure is None and not episode.over
            if moved:
                self._worlds.report(
                    f"a worker was lost; episodes that go on in the one that replaces it: {moved}"
                )
            self._worlds.changed.notify_all()
            return bool(running or closing)

    def _move(self, episode: _Episode, end: str) -> None:
        episode.moves += 1
        if episode.moves > MAX_MOVES:
            self._worlds.fail(
                episode, f"the episode lost its worker {episode.moves} times; lastly another {end}"
            )
            return
        episode.in_place = not episode.steps
        self.todo.append(episode)

    @property
    def _busy(self) -> bool:
        return bool(self._sent or self._running or self._closing)

    def _next(self, episode: _Episode) -> EpisodeRequest | None:
        """What to tell the worker about an episode, if anything."""
        number = episode.number
        if number not in self.held or number in self._closing:
            return None
        if episode.over or episode.failure is not None:
            self._sent.pop(number, None)
            self._running.pop(number, None)
            self._closing.add(number)
            return Close(number)
        if number in self._sent or number in self._running:
            return None
        request: EpisodeRequest
        if not episode.in_place:
            done = episode.actions[: len(episode.steps) - 1]  # the last one may still be asked
            request = Restore(number, episode.task, done, list(episode.steps), episode.snapshot)
        elif episode.asked_at is None:
            return None
        elif not episode.steps:
            request = Reset(number, episode.task)
        else:
            request = Act(number, episode.actions[-1])
        self._sent[number] = request
        episode.known = True
        return request

    def _take(self, message: Began | Answered | Refused | Closed) -> bool:
        """Whether the message is about something that was asked."""
        number = message.episode
        episode = self.held.get(number)
        if episode is None:
            return False
        if isinstance(message, Began):
            if number in self._sent:
                self._running[number] = self._sent.pop(number)
            return True
        if isinstance(message, Closed):
            if number not in self._closing and not episode.over and episode.failure is None:
                return False
            self._closing.discard(number)
            self._leave(episode, message.error)
            return True
        if number in self._closing:  # it was given up meanwhile
            return True
        request = self._running.get(number)
        if request is None or (
            isinstance(message, Answered) and (message.step is None) != isinstance(request, Restore)
        ):
            return False
        del self._running[number]
        if isinstance(message, Refused):
            self._closing.add(number)  # the worker closes it by itself
            self._worlds.fail(episode, message.error)
        elif message.step is None:
            episode.in_place = True
            self.todo.append(episode)
        elif not episode.over:
            if message.step.done:
                self._closing.add(number)
            self._worlds.answer(episode, message.step, message.snapshot)
        return True

    def _leave(self, episode: _Episode, error: str | None) -> None:
        del self.held[episode.number]
        self._worlds.gone(episode, error)
