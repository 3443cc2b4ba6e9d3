"""Eight-bit floats with scales: FP8 checkpoints, compressed-tensors' floats, MXFP8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.quantization.row_weight import RowWeight
from graftlm.quantization.scale_grid import ScaleGrid, eight_bit_values


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaledFloat8(RowWeight):
    """A `Weight` of eight-bit floats.

    Semantics: w[n, k] = value[n, k] * scale of (n, k) in float32; then one cast.

    values: float8_e4m3fn or float8_e5m2 [out, in].
    """

    values: Tensor
    grid: ScaleGrid

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.grid.num_bytes

    @property
    def format(self) -> str:
        return f"{str(self.values.dtype).removeprefix('torch.')}, {self.grid}"

    @property
    def device(self) -> torch.device:
        return self.values.device

    def decode(self) -> Tensor:
        return self.values.float().mul_(self.grid.values())

    def grouped_codes(self) -> GroupedCodes:
        return GroupedCodes(
            codes=self.values.view(torch.uint8),
            bits=8,
            table=eight_bit_values(self.values.dtype),
            scale=self.grid.by_row(),
            group_size=self.grid.columns.size,
        )

    def pick(self, rows: slice | Tensor) -> ScaledFloat8:
        return ScaledFloat8(values=self.values[rows], grid=self.grid.pick(rows), dtype=self.dtype)
