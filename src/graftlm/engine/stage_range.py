"""Some of the stretches that a model's layers are divided into. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StageRange:
    """Stages [first, last] of `count`."""

    first: int
    last: int
    count: int

    @property
    def is_everything(self) -> bool:
        return self.first == 0 and self.last == self.count - 1

    def union(self, other: StageRange | None) -> StageRange:
        """The shortest range that holds both."""
        if other is None:
            return self
        return StageRange(first=min(self.first, other.first), last=max(self.last, other.last), count=self.count)
