"""How large a forward and backward pass may be, so that it takes no longer than it should."""

from __future__ import annotations

# Part of the last measurement in what is expected of the next.
_WEIGHT = 0.3


class Pace:
    """Learns from the passes that were made what one costs.

    Args:
        max_seconds: that a pass should take. One example is a pass whatever it takes.
    """

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self._seconds_per_row: float | None = None

    @property
    def max_rows(self) -> int:
        """Rows that fit into a pass; none before the first was measured."""
        return 0 if self._seconds_per_row is None else int(self.max_seconds / self._seconds_per_row)

    def fits(self, num_rows: int) -> bool:
        """Whether a pass of so many rows is expected to end in time."""
        return self._seconds_per_row is not None and num_rows * self._seconds_per_row <= self.max_seconds

    def record(self, num_rows: int, seconds: float) -> None:
        """Take note of a pass."""
        found = max(seconds, 1e-9) / max(num_rows, 1)
        known = self._seconds_per_row
        self._seconds_per_row = found if known is None else known + _WEIGHT * (found - known)
