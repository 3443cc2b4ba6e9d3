"""Which scale each element of a matrix has, for scales per tensor, fused part, row, group or block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import CodedValues, GroupValues, PlainValues
from graftlm.quantization.column_groups import ColumnGroups


def eight_bit_values(dtype: torch.dtype) -> Tensor:
    """What each byte stands for in a float dtype of eight bits, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaleGrid:
    """Scales in rows and columns, each for a rectangle of the matrix.

    scale: [R, C], a float dtype, float8_e8m0fnu included.
    row_groups: [out] int32, the row of `scale` that a row of the matrix takes its scales from.
    columns: the column of `scale` for each column of the matrix.
    """

    scale: Tensor
    row_groups: Tensor
    columns: ColumnGroups

    def per_row(self, scale: Tensor) -> Tensor:
        """The scales, or what has their shape, of each row of the matrix. scale: [R, C] -> [out, C]."""
        return scale[self.row_groups]

    def values(self) -> Tensor:
        """Each element's scale, float32 [out, in]."""
        return self.columns.spread(self.per_row(self.scale.float()))

    def by_row(self) -> GroupValues:
        """The scales of each row, for the kernels; those of eight bits stay so."""
        if self.scale.dtype.itemsize == 1:
            codes = self.per_row(self.scale.view(torch.uint8))
            return CodedValues(codes=codes, table=eight_bit_values(self.scale.dtype), factors=torch.ones(1))
        own = torch.arange(self.scale.shape[0], dtype=self.row_groups.dtype, device=self.row_groups.device)
        return PlainValues(stored=self.scale, row_groups=None if torch.equal(self.row_groups, own) else self.row_groups)

    @property
    def num_bytes(self) -> int:
        return self.scale.nbytes + self.row_groups.nbytes + self.columns.num_bytes

    def pick(self, rows: slice | Tensor) -> ScaleGrid:
        return ScaleGrid(scale=self.scale, row_groups=self.row_groups[rows], columns=self.columns)

    def __str__(self) -> str:
        num_rows, num_columns = self.scale.shape
        return "one scale" if num_rows == num_columns == 1 else f"{num_rows} x {num_columns} scales"
