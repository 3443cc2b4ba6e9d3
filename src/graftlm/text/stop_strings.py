"""Ending an answer at a stop string, of which not even the first character may reach the client."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text through, holding back any end that may be the beginning of a stop string.

    Args:
        keep_match: whether the stop string itself is shown too.
    """

    def __init__(self, stops: Sequence[str], *, keep_match: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is now safe to show. After a match, sets `matched` and drops the rest.

        The stop that is complete first wins, of two the longer: what it would be had the text come by the character.
        """
        if not self._stops:
            return text
        buffer = self._held + text
        found = [(index, stop) for stop in self._stops if (index := buffer.find(stop)) >= 0]
        if found:
            index, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return buffer[: index + len(self.matched)] if self._keep_match else buffer[:index]
        hold = self._longest_stop_prefix_at_end(buffer)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_stop_prefix_at_end(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:size]):
                    longest = size
                    break
        return longest
