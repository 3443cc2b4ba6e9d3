"""What a plan has the library read, at a place that stays."""

from __future__ import annotations

import numpy as np


class PlanTable:
    """entries: int64 [..., entries, fields] of csrc's structures; those of zeros say nothing. kept: what addresses in
    them point into."""

    def __init__(self, entries: np.ndarray, kept: object = None) -> None:
        self.entries = entries
        self._kept = kept

    @property
    def address(self) -> int:
        address: int = self.entries.ctypes.data
        return address

    def copy(self, *, capacity: int) -> PlanTable:
        """The same with room for as many entries."""
        *outer, _, fields = self.entries.shape
        copy = PlanTable(np.zeros((*outer, capacity, fields), dtype=np.int64))
        copy.take_over(self)
        return copy

    def take_over(self, other: PlanTable) -> None:
        """As `PlanMemory`."""
        count = other.entries.shape[-2]
        self.entries[..., :count, :] = other.entries
        self.entries[..., count:, :] = 0
        self._kept = other._kept
