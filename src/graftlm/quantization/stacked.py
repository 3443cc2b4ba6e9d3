"""Several weights one under the other, as one: projections that are stored apart and applied together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.quantization.weight import Weight


class StackedWeight:
    """A `Weight` whose rows are those of its parts in order, each kept in its own format.

    parts: at least one; all with the same number of columns.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        self._parts = tuple(parts)
        self._starts = [0]
        for part in self._parts:
            self._starts.append(self._starts[-1] + part.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self._starts[-1], self._parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def format(self) -> str:
        return " and ".join(dict.fromkeys(part.format for part in self._parts))

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.join_columns(
            [part.matmul(x, None if bias is None else bias[start:stop]) for start, stop, part in self._spans()]
        )

    def rows(self, ids: Tensor) -> Tensor:
        gathered = [
            (where := ((ids >= start) & (ids < stop)).nonzero()[:, 0], part.rows(ids[where] - start))
            for start, stop, part in self._spans()
        ]
        where = torch.cat([where for where, _ in gathered])
        if len(where) != len(ids):
            raise IndexError(f"ids outside the {self.shape[0]} rows of the matrix")
        values = torch.cat([values for _, values in gathered])
        return torch.empty_like(values).index_copy_(0, where, values)

    def part(self, start: int, stop: int) -> Weight:
        inside = [
            part if first >= start and last <= stop else part.part(max(start - first, 0), min(stop, last) - first)
            for first, last, part in self._spans()
            if first < stop and last > start
        ]
        return inside[0] if len(inside) == 1 else StackedWeight(inside)

    def column_part(self, start: int, stop: int) -> Weight:
        return StackedWeight([part.column_part(start, stop) for part in self._parts])

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self._parts])

    def grouped_codes(self) -> GroupedCodes | None:
        return None

    def _spans(self) -> list[tuple[int, int, Weight]]:
        return list(zip(self._starts, self._starts[1:], self._parts, strict=False))
