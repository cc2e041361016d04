"""The episodes that have a place in one worker: what to send to it about them, and what its messages mean.

Invariants
* The worker is sent one request at a time for each episode, and at most `SENT_AHEAD` that it has not begun.
* An episode leaves its place when the worker has closed it, or is gone; or at once if the worker never heard of it.
* When the worker is lost, the episodes whose methods were being called fail. The others are put back in the process
  that replaces it, at most `MAX_MOVES` times between two answers.
* A worker at work says `Began` before each call of a method, and when each is over. So one that is silent for
  `timeout_s` and `GRACE_S` is blocked, and `deadline` says when that is.

The crew calls this as its `Work`; `owner.changed` guards it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol

from headrace.environments.base import Step
from headrace.environments.episode import Episode
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

if TYPE_CHECKING:
    from headrace.config import EnvironmentConfig

MAX_MOVES = 3
"""How often an episode may lose its worker between two answers of its world."""

SENT_AHEAD = 8
"""Requests that a worker may have been sent and not begun, so that a worker that hangs does not fill its socket."""

GRACE_S = 1.0
"""How much longer than a method may take a worker may be silent: it cancels async methods itself."""


class EpisodeOwner(Protocol):
    """Who is told what became of an episode, with `changed` held."""

    config: EnvironmentConfig
    changed: Condition

    def on_answer(self, episode: Episode, step: Step, snapshot: Any) -> None:
        """Its world has answered what was asked."""
        ...

    def on_failure(self, episode: Episode, error: str) -> None:
        """It cannot go on; its instance, if there still is one, is closed."""
        ...

    def on_place_free(self, episode: Episode, error: str | None) -> None:
        """Its place is free again; `error` says how its `close` failed."""
        ...

    def report(self, text: str) -> None:
        """Something went wrong that cost no attempt."""
        ...


class HeldEpisodes:
    """The work of one worker, over all the processes that ever stand in its place."""

    def __init__(self, owner: EpisodeOwner) -> None:
        self.held: dict[int, Episode] = {}
        self.deadline = math.inf
        self._owner = owner
        self._silence_s = owner.config.timeout_s + GRACE_S
        # Episodes for which something may have to be sent; looked at in this order.
        self._todo: deque[Episode] = deque()
        # Where an episode's request stands: sent, then begun. A close is on its way from `Close` to `Closed`.
        self._sent: dict[int, EpisodeRequest] = {}
        self._begun: dict[int, EpisodeRequest] = {}
        self._closing: set[int] = set()

    # What the owner asks; `changed` is held

    def hold(self, episode: Episode) -> None:
        """Give an episode a place here."""
        self.held[episode.number] = episode
        self._todo.append(episode)

    def serve(self, episode: Episode) -> None:
        """Something new is asked of an episode that has its place here."""
        self._todo.append(episode)

    def close(self, episode: Episode) -> None:
        """Have the instance of an episode that has ended closed; then its place is free."""
        if not episode.known:
            self._free_place(episode, None)
        elif episode.number not in self._closing:
            self._todo.append(episode)

    # What the crew asks

    def next_requests(self, now: float) -> list[EpisodeRequest]:
        with self._owner.changed:
            requests: list[EpisodeRequest] = []
            was_idle = not self._at_work
            while self._todo and len(self._sent) < SENT_AHEAD:
                request = self._next_request_of(self._todo.popleft())
                if request is not None:
                    requests.append(request)
            if requests and was_idle:
                self.deadline = now + self._silence_s
            return requests

    def on_message(self, message: Reply, now: float) -> bool:
        if not isinstance(message, Began | Answered | Refused | Closed):
            return False
        with self._owner.changed:
            expected = self._apply(message, now)
            if expected:
                self.deadline = now + self._silence_s if self._at_work else math.inf
                self._owner.changed.notify_all()
            return expected

    def on_lost(self, how: str | None) -> bool:
        with self._owner.changed:
            now = time.monotonic()
            begun, closing = self._begun, self._closing
            self._sent, self._begun, self._closing, self._todo = {}, {}, set(), deque()
            self.deadline = math.inf
            limit = f"{self._owner.config.timeout_s:g} s (environment.timeout_s)"
            end = (
                f"blocked its worker for more than {limit}, which was killed"
                if how is None
                else f"ended its worker, which {how}"
            )
            together = f" ({len(begun)} episodes were being served)" if len(begun) > 1 else ""
            moved = 0
            for episode in list(self.held.values()):
                episode.lose_worker(now)
                if episode.ended:
                    called = "close() " + end if episode.number in closing else None
                    self._free_place(episode, called)
                elif episode.number in begun:
                    self._owner.on_failure(episode, f"{begun[episode.number]} {end}{together}")
                else:
                    self._move(episode, end)
                    moved += not episode.ended
            if moved:
                self._owner.report(
                    f"a worker was lost; episodes that go on in the one that replaces it: {moved}"
                )
            self._owner.changed.notify_all()
            return bool(begun or closing)

    def _move(self, episode: Episode, end: str) -> None:
        """Have the episode put back in the process that comes next, or fail it if that was done too often."""
        episode.moves += 1
        if episode.moves > MAX_MOVES:
            self._owner.on_failure(
                episode, f"the episode lost its worker {episode.moves} times; lastly another {end}"
            )
            return
        episode.up_to_date = not episode.steps
        self._todo.append(episode)

    @property
    def _at_work(self) -> bool:
        return bool(self._sent or self._begun or self._closing)

    def _next_request_of(self, episode: Episode) -> EpisodeRequest | None:
        """What to send to the worker about an episode now, if anything; noted as sent."""
        number = episode.number
        if number not in self.held or number in self._closing:
            return None
        if episode.ended:
            self._sent.pop(number, None)
            self._begun.pop(number, None)
            self._closing.add(number)
            return Close(number)
        if number in self._sent or number in self._begun:
            return None
        request: EpisodeRequest
        if not episode.up_to_date:
            answered = episode.actions[: len(episode.steps) - 1]  # the last one may still be asked
            request = Restore(number, episode.task, answered, list(episode.steps), episode.snapshot)
        elif not episode.asked:
            return None
        elif not episode.steps:
            request = Reset(number, episode.task)
        else:
            request = Act(number, episode.actions[-1])
        self._sent[number] = request
        episode.known = True
        return request

    def _apply(self, message: Began | Answered | Refused | Closed, now: float) -> bool:
        """Do what the message means. Whether it is about something that was asked; else nothing has changed."""
        number = message.episode
        episode = self.held.get(number)
        if episode is None:
            return False
        if isinstance(message, Began):
            if number in self._sent:
                self._begun[number] = self._sent.pop(number)
                episode.enter_worker(now)
            return True
        if isinstance(message, Closed):
            if number not in self._closing and not episode.ended:
                return False
            self._closing.discard(number)
            self._free_place(episode, message.error)
            return True
        if number in self._closing:  # `Close` was sent meanwhile: nobody waits for this
            return True
        request = self._begun.get(number)
        answers_restore = isinstance(message, Answered) and message.step is None
        if request is None or (
            isinstance(message, Answered) and answers_restore != isinstance(request, Restore)
        ):
            return False
        del self._begun[number]
        if isinstance(message, Refused):
            self._closing.add(number)  # the worker closes it by itself
            self._owner.on_failure(episode, message.error)
        elif message.step is None:
            episode.up_to_date = True
            self._todo.append(episode)
        elif not episode.over:
            if message.step.done:
                self._closing.add(number)  # here too
            self._owner.on_answer(episode, message.step, message.snapshot)
        return True

    def _free_place(self, episode: Episode, error: str | None) -> None:
        del self.held[episode.number]
        self._owner.on_place_free(episode, error)
