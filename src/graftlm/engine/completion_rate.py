"""How fast answers have been finishing of late. Knows times and counts; knows nothing of requests."""

from __future__ import annotations

import math
from collections import deque

# What is longer ago says little about the traffic of now.
WINDOW_SECONDS = 60.0


class CompletionRate:
    """Estimates when more answers will have finished, from those that did within the last minute.

    Args:
        now: a time in seconds on the clock that the other methods are told.
    """

    def __init__(self, now: float) -> None:
        self._started = now
        self._finished: deque[tuple[float, int]] = deque()

    def record(self, count: int, now: float) -> None:
        """`count` answers have finished."""
        self._finished.append((now, count))
        while self._finished[0][0] < now - WINDOW_SECONDS:
            self._finished.popleft()

    def seconds_until(self, count: int, now: float) -> int:
        """Whole seconds, at least one, until `count` more will have finished if it goes on like this.

        While fewer than two have finished, the first is taken to need as long again as it has been waited for.
        """
        recent = [entry for entry in list(self._finished) if entry[0] >= now - WINDOW_SECONDS]
        if len(recent) < 2:
            per_answer = min(now - self._started, WINDOW_SECONDS)
        else:
            # The first marks where the interval begins.
            per_answer = (now - recent[0][0]) / sum(finished for _, finished in recent[1:])
        return max(math.ceil(count * per_answer), 1)
