"""The live episodes of an environment of conversations: which have a place in a worker, and which wait for one.

Invariants
* What is asked of an episode gets exactly one reply, unless the episode is dropped. An episode whose reply has an
  error, or is done, is over.
* An episode keeps one place in one worker until its instance there was closed, or the worker was lost after the episode
  had ended. No worker has more than `episodes_per_worker`. Those that wait get places in the order in which they came.
* An episode's world takes at most `episode_timeout_s` in all. Waiting for a place, or for a lost worker to be
  replaced, is not counted (see `episode.py`). The first has no deadline here, as what holds the places may be at rest
  while the policy writes: whoever asks bounds it. The second ends with the crew, which gives up after a few starts.

The crew's thread and the pool's callers share this; `changed` guards it, and every public method takes it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from threading import Condition
from typing import TYPE_CHECKING, Any

from headrace.environments.base import Action, Step
from headrace.environments.episode import Episode
from headrace.environments.held_episodes import HeldEpisodes
from headrace.environments.reply import WorldReply

if TYPE_CHECKING:
    from headrace.config import EnvironmentConfig


class Worlds:
    """Every live episode.

    Args:
        config: the limits.
        changed: guards all of this; notified by whoever calls `reply`.
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
        self._report = report
        self._reply = reply
        self._live: dict[Hashable, Episode] = {}
        self._waiting: deque[Episode] = deque()
        self._workers: list[HeldEpisodes] = []
        self._worker_of: dict[Episode, HeldEpisodes] = {}
        self._count = 0
        self._when_closed: dict[Episode, Callable[[str | None], None]] = {}

    @property
    def places(self) -> int:
        """How many episodes may be in workers at once."""
        return self.config.episodes_per_worker * self.config.workers

    @property
    def num_live(self) -> int:
        """Episodes that are not over, whether or not they have a place."""
        with self.changed:
            return len(self._live)

    def add_worker(self) -> HeldEpisodes:
        """The work of one more worker."""
        with self.changed:
            self._workers.append(HeldEpisodes(self))
            return self._workers[-1]

    # What callers ask

    def reset(self, key: Hashable, task: dict[str, Any]) -> None:
        with self.changed:
            self._new(key, task).ask(time.monotonic())

    def step(self, key: Hashable, action: Action) -> None:
        with self.changed:
            episode = self._live.get(key)
            if episode is None:
                raise ValueError(f"no episode {key!r} is live; begin one with reset")
            if episode.asked:
                raise ValueError(f"episode {key!r} is still to answer")
            episode.actions.append(action)
            episode.ask(time.monotonic())
            if episode.failure is not None:
                self.on_failure(episode, episode.failure)
            elif episode in self._worker_of:
                self._worker_of[episode].serve(episode)

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
            episode.up_to_date = not replies
            if len(actions) == len(replies):
                episode.ask(time.monotonic())

    def drop(self, key: Hashable, when_closed: Callable[[str | None], None] | None = None) -> None:
        """Give an episode up. `when_closed` gets the error of its `close`, or None."""
        with self.changed:
            episode = self._live.get(key)
            if episode is None:
                return
            worker = self._worker_of.get(episode)
            if when_closed is not None and worker is None:
                when_closed(None)
            elif when_closed is not None:
                self._when_closed[episode] = when_closed
            self._end(episode)
            if worker is not None:
                worker.close(episode)

    # What the crew's thread asks

    def fail_late_and_fill_places(self, now: float) -> float:
        """Fail the episodes whose worlds have taken too long, and give free places to those that wait.

        Returns when the next one will have taken too long.
        """
        with self.changed:
            limit = self.config.episode_timeout_s
            next_at = math.inf
            for episode in list(self._live.values()):
                late_at = episode.late_at(limit)
                if now < late_at:
                    next_at = min(next_at, late_at)
                else:
                    self.on_failure(
                        episode,
                        f"the episode's world took {limit:g} s in all (environment.episode_timeout_s)",
                    )
            while self._waiting and self._workers:
                worker = min(self._workers, key=lambda worker: len(worker.held))
                if len(worker.held) >= self.config.episodes_per_worker:
                    break
                episode = self._waiting.popleft()
                self._worker_of[episode] = worker
                worker.hold(episode)
            return next_at

    # What the workers' episodes tell; `changed` is held

    def on_answer(self, episode: Episode, step: Step, snapshot: Any) -> None:
        episode.steps.append(step)
        episode.moves = 0
        episode.snapshot = snapshot
        seconds = episode.reply(time.monotonic())
        if step.done:
            self._end(episode)
        self._reply(
            WorldReply(
                episode.key, step.reward, None, step.observation, step.done, step.info, snapshot, seconds
            )
        )

    def on_failure(self, episode: Episode, error: str) -> None:
        """Reply that the episode has failed, now or, if nothing is asked of it, when something will be."""
        if episode.over:
            return
        if episode.asked:
            seconds = episode.reply(time.monotonic())
            self._reply(WorldReply(episode.key, None, error, seconds=seconds))
            self._end(episode)
        else:
            episode.failure = error
        if episode in self._worker_of:
            self._worker_of[episode].close(episode)

    def on_place_free(self, episode: Episode, error: str | None) -> None:
        del self._worker_of[episode]
        when_closed = self._when_closed.pop(episode, None)
        if when_closed is not None:
            when_closed(error)
        elif error is not None:
            self.report(f"an episode's {error}")

    def report(self, text: str) -> None:
        self._report(text)

    def _new(self, key: Hashable, task: dict[str, Any]) -> Episode:
        if key in self._live:
            raise ValueError(f"an episode {key!r} is already live")
        self._count += 1
        episode = self._live[key] = Episode(self._count, key, task)
        self._waiting.append(episode)
        return episode

    def _end(self, episode: Episode) -> None:
        """Nothing is asked or told of it any more; if it has a place, it keeps that until it is closed."""
        episode.over = True
        del self._live[episode.key]
        if episode not in self._worker_of and episode in self._waiting:
            self._waiting.remove(episode)
