"""Four-bit floats with a scale per group: NVFP4 and MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import CodedValues, GroupedCodes
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.row_weight import RowWeight
from graftlm.quantization.scale_grid import eight_bit_values

# One sign bit, two exponent bits, one mantissa bit; the upper eight codes are the negatives.
# Source: OCP Microscaling Formats (MX) v1.0, table for FP4.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = torch.tensor([*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES)])


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaledE2M1(RowWeight):
    """A `Weight` of four-bit floats.

    Semantics: w[n, k] = e2m1(code[n, k]) * (scale[n, g] / global_scale) in float32, g the group of column k; then one
    cast.

    codes: [out, in], 4 bits. scale: [out, groups], float8_e4m3fn or float8_e8m0fnu. global_scale: float32 [1].
    """

    codes: PackedCodes
    scale: Tensor
    global_scale: Tensor
    columns: ColumnGroups

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.stream.shape[0], self.codes.columns

    @property
    def num_bytes(self) -> int:
        return self.codes.stream.nbytes + self.scale.nbytes + self.global_scale.nbytes

    @property
    def format(self) -> str:
        return f"float4_e2m1, {self.columns}"

    @property
    def device(self) -> torch.device:
        return self.codes.stream.device

    def decode(self) -> Tensor:
        values = E2M1_VALUES.to(self.scale.device)[self.codes.unpack().int()]
        return values.mul_(self.columns.spread(self.scale.float() / self.global_scale))

    def grouped_codes(self) -> GroupedCodes:
        table = eight_bit_values(self.scale.dtype).to(self.device) / self.global_scale
        scale = CodedValues(codes=self.scale.view(torch.uint8), table=table, factors=torch.ones(1, device=self.device))
        return GroupedCodes(
            codes=self.codes.unpack(), bits=4, table=E2M1_VALUES, scale=scale, group_size=self.columns.size
        )

    def pick(self, rows: slice | Tensor) -> ScaledE2M1:
        return ScaledE2M1(
            codes=self.codes.pick(rows),
            scale=self.scale[rows],
            global_scale=self.global_scale,
            columns=self.columns,
            dtype=self.dtype,
        )
