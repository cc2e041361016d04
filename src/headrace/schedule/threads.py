"""How many threads to compute with beside other processes.

Threads of one operation wait for one another. When another process takes a core, the operation waits for the thread
that lost it, and everything runs at that thread's pace: on two cores one busy neighbour costs far more than half.
With one thread fewer it costs its share.

Invariants
* The number lies between 1 and `most`.
* It falls as soon as a window shows others at work, and rises only after `PATIENCE` windows in a row allow it.
"""

from __future__ import annotations

WINDOW_S = 1.0
"""Seconds over which the use of the cores is measured."""

PATIENCE = 2
"""Windows in a row that must allow more threads."""


class ThreadShare:
    """Decides the number of threads from counters of CPU time. Reads no clock.

    Args:
        cores: cores whose use is counted.
        most: threads to use when nobody else computes.
    """

    def __init__(self, cores: int, most: int) -> None:
        self.cores = cores
        self.most = most
        self.threads = most
        self._last: tuple[float, float] | None = None
        self._room = 0

    def observe(self, now: float, others: float) -> int:
        """Take a reading and return the number of threads to use.

        Args:
            now: seconds on any steady clock.
            others: CPU seconds that other processes have used on the cores until now.
        """
        if self._last is None:
            self._last = (now, others)
            return self.threads
        then, before = self._last
        if now - then < WINDOW_S:
            return self.threads
        self._last = (now, others)
        taken = max(0.0, others - before) / (now - then)
        wanted = max(1, min(self.most, round(self.cores - taken)))
        if wanted < self.threads:
            self.threads, self._room = wanted, 0
        elif wanted > self.threads:
            self._room += 1
            if self._room >= PATIENCE:
                self.threads, self._room = wanted, 0
        else:
            self._room = 0
        return self.threads
