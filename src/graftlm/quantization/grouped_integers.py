"""Integer codes in groups that have a scale and a zero point: GPTQ, AWQ and compressed-tensors' integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import SIGNED_BYTES, SIGNED_NIBBLES, GroupedCodes, PlainValues
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.gptq_layout import gptq_tensors
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.row_weight import RowWeight


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedIntegers(RowWeight):
    """A `Weight` of unsigned codes.

    Semantics: w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] in float32, g the group of column k; then one cast.

    codes: [out, in]. scale: [out, groups], a float dtype. zero: [out, groups] uint8.
    """

    codes: PackedCodes
    scale: Tensor
    zero: Tensor
    columns: ColumnGroups

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.stream.shape[0], self.codes.columns

    @property
    def num_bytes(self) -> int:
        return self.codes.stream.nbytes + self.scale.nbytes + self.zero.nbytes + self.columns.num_bytes

    @property
    def format(self) -> str:
        return f"int{self.codes.bits}, {self.columns}"

    @property
    def device(self) -> torch.device:
        return self.codes.stream.device

    def decode(self) -> Tensor:
        # int16 holds the difference exactly and takes half of what float32 would.
        steps = self.codes.unpack().to(torch.int16).sub_(self.columns.spread(self.zero.to(torch.int16)))
        return steps.float().mul_(self.columns.spread(self.scale.float()))

    def grouped_codes(self) -> GroupedCodes | None:
        order = self.columns.in_groups()
        if order is None and self.columns.index is not None:
            return None
        bits, table = (4, SIGNED_NIBBLES) if self.codes.bits <= 4 else (8, SIGNED_BYTES)
        # Symmetric codes have their zero in the middle: so it is the table that takes it away.
        middle = 1 << (self.codes.bits - 1)
        codes = self.codes.unpack() + ((1 << (bits - 1)) - middle)
        zero = self.zero.to(torch.int16) - middle
        return GroupedCodes(
            codes=codes if order is None else codes[:, order],
            bits=bits,
            table=table,
            scale=PlainValues(stored=self.scale),
            group_size=self.columns.size,
            zero=zero if zero.any() else None,
            order=order,
        )

    def stored_tensors(self) -> dict[str, Tensor]:
        """As `StorableWeight`: GPTQ's, version 1.

        Raises:
            CheckpointError: the shape or the number of bits has no place there.
        """
        return gptq_tensors(self.codes, scale=self.scale, zero=self.zero, columns=self.columns)

    def pick(self, rows: slice | Tensor) -> GroupedIntegers:
        return GroupedIntegers(
            codes=self.codes.pick(rows),
            scale=self.scale[rows],
            zero=self.zero[rows],
            columns=self.columns,
            dtype=self.dtype,
        )
