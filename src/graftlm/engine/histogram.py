"""Counts of values by size. Plain Python."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Histogram:
    """How many values fell into each interval, and their sum.

    bounds: the largest value of each interval, ascending; one more interval takes what is larger.
    counts: of each interval alone, not of those below it.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Count what another one with the same bounds has counted too."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
