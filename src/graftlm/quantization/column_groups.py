"""Which of a row's groups each input column belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnGroups:
    """Columns that share a scale.

    size: consecutive columns per group, of which the last may have fewer.
    index: [columns] int32, the group of each column, where they are not consecutive (act-order); None where they are.
    """

    columns: int
    size: int
    index: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Each column's own value. values: [R, groups] -> [R, columns]."""
        if self.index is not None:
            return values[:, self.index]
        if values.shape[1] == 1:
            return values.expand(-1, self.columns)
        return values.repeat_interleave(self.size, dim=1)[:, : self.columns]

    def in_groups(self) -> Tensor | None:
        """The columns sorted by their groups, int64 [columns], where these are of `size` columns each, except that the
        last may have fewer; None where that is not so, or they are consecutive anyway."""
        if self.index is None:
            return None
        order = self.index.argsort(stable=True)
        expected = torch.arange(self.columns, dtype=self.index.dtype, device=order.device) // self.size
        return order if torch.equal(self.index[order], expected) else None

    @property
    def num_bytes(self) -> int:
        return 0 if self.index is None else self.index.nbytes

    def __str__(self) -> str:
        if self.index is not None:
            return "groups in activation order"
        return "one scale per row" if self.size >= self.columns else f"groups of {self.size}"
