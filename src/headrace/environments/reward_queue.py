"""The rewards that callers have asked for and no worker has computed yet, for an environment of `tasks` + `reward`.

Invariants
* Each is computed once, in the order in which they were asked for, and gets one reply unless it was dropped.
* `WorldReply.seconds` counts from when a worker takes it, not from when it was asked for.

`changed` of the pool guards all of this, and is held by whoever calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from headrace.environments.jobs import Job
from headrace.environments.messages import Reward
from headrace.environments.reply import WorldReply


class RewardQueue:
    """Rewards on their way from those who ask to the workers. `reply` takes the replies."""

    def __init__(self, reply: Callable[[WorldReply], None]) -> None:
        self._reply = reply
        self._wanted: dict[Hashable, Reward] = {}
        self._no_worker_yet: deque[tuple[Hashable, Reward]] = deque()

    def ask(self, key: Hashable, request: Reward) -> None:
        self._wanted[key] = request
        self._no_worker_yet.append((key, request))

    def drop(self, key: Hashable) -> None:
        """Give up a reward, if there is one. A worker that is at it goes on, and its result is thrown away."""
        if self._wanted.pop(key, None) is not None:
            self._no_worker_yet = deque(item for item in self._no_worker_yet if item[0] != key)

    def next_job(self) -> Job | None:
        """What a worker should do now."""
        if not self._no_worker_yet:
            return None
        key, request = self._no_worker_yet.popleft()
        began = time.monotonic()

        def finish(value: Any, error: str | None) -> None:
            if self._wanted.get(key) is request:  # else it was dropped, and perhaps asked for again
                del self._wanted[key]
                self._reply(WorldReply(key, value, error, seconds=time.monotonic() - began))

        return Job(request, finish)
