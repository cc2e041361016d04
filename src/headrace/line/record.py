"""The account of a running line: events go to the journal, then into the state, and then to whoever listens.

Invariants
* Nothing changes the state but an event that was recorded.
* The events of one `commit` are one frame of the journal: after a crash all of them are there, or none.
* Nobody outside hears of an event before it is committed: what a crash takes back, nobody has seen.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.runs.events import Event, encode
from headrace.runs.state import RunState, Settled
from headrace.state.journal import Journal

Listener = Callable[[Event, list[Settled]], None]
"""Told each committed event, in order, and what it has settled."""


class Record:
    """The state of a line, and the journal that it can be folded from again.

    Args:
        journal: where events are written; None for rollouts that nobody wants again, such as an evaluation's.
        state: what the journal's events have led to so far.
    """

    def __init__(self, journal: Journal | None, state: RunState | None = None) -> None:
        self.journal = journal
        self.state = state or RunState()
        self.listeners: list[Listener] = []
        self._events: list[tuple[Event, list[Settled]]] = []

    def emit(self, event: Event) -> None:
        """Something has happened."""
        self._events.append((event, self.state.apply(event)))

    def commit(self) -> None:
        """Write what has happened since the last commit, and tell the listeners. They may emit further events."""
        while self._events:
            events, self._events = self._events, []
            if self.journal is not None:
                self.journal.record(*encode([event for event, _ in events]))
                self.journal.commit()
            for event, settled in events:
                for listener in self.listeners:
                    listener(event, settled)
