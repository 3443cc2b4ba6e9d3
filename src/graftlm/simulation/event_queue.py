"""A clock that goes from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """What happens when, in order of time; at one time, in the order in which it was planned.

    now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Plan something for later. It cannot be taken back: whoever changes his mind does nothing then."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happen))

    def run(self, until: float) -> None:
        """Let everything happen that is planned up to a time, and what follows from it."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.now = max(self.now, until)
