"""When a waiting session comes back: the median of what its world took the last times.

Invariant: pure. Times come in as arguments; what was never seen is not guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median


class ReturnTimes:
    """Answer times by source (an environment, a tool), in seconds.

    Args:
        window: the last answers of a source that count.
    """

    def __init__(self, window: int = 32) -> None:
        self._window = window
        self._times: dict[Hashable, deque[float]] = {}

    def record(self, source: Hashable, seconds: float) -> None:
        """An answer took so long; times that are not finite or negative are ignored."""
        if 0 <= seconds < float("inf"):
            self._times.setdefault(source, deque(maxlen=self._window)).append(seconds)

    def predict(self, source: Hashable) -> float | None:
        """Seconds until an answer that is asked for now; None for a source that never answered."""
        times = self._times.get(source)
        return median(times) if times else None
