"""Matrices of 8-bit integers with a scale per row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import SIGNED_BYTES, GroupedCodes, PlainValues
from graftlm.quantization.dequantized import decode_in_slabs, dequantized_matmul


@dataclass(frozen=True, kw_only=True, eq=False)
class EightBitWeight:
    """A `Weight` of 8-bit integers: w[n, k] = codes[n, k] * absmax[n] / 127, computed in float32 and rounded once to
    `dtype`. Inputs are not quantised, so that a row of `matmul` depends on nothing but itself; LLM.int8() treats the
    outliers of a whole batch alike.

    codes: int8 [out, in].
    absmax: float32 [out], the largest magnitude of each row.
    dtype: the compute dtype.

    Source: LLM.int8(), arXiv 2208.07339; the layout is bitsandbytes'.
    """

    codes: Tensor
    absmax: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes

    @property
    def quantization(self) -> str:
        """The name of the quantiser that makes such weights."""
        return "int8"

    @property
    def format(self) -> str:
        return "int8, by row"

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dequantized_matmul(self, x, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return decode_in_slabs(
            lambda start, stop: _decode(self.codes[ids[start:stop]], self.absmax[ids[start:stop]]),
            shape=(len(ids), self.shape[1]),
            dtype=self.dtype,
            device=self.codes.device,
        )

    def part(self, start: int, stop: int) -> EightBitWeight:
        return replace(self, codes=self.codes[start:stop], absmax=self.absmax[start:stop])

    def column_part(self, start: int, stop: int) -> EightBitWeight:
        return replace(self, codes=self.codes[:, start:stop].contiguous())

    def dequantize(self) -> Tensor:
        return decode_in_slabs(
            lambda start, stop: _decode(self.codes[start:stop], self.absmax[start:stop]),
            shape=self.shape,
            dtype=self.dtype,
            device=self.codes.device,
        )

    def columns(self, ids: Tensor) -> Tensor:
        """Columns of the matrix, float32 [out, T]. ids: int64 [T]."""
        return _decode(self.codes[:, ids], self.absmax)

    def grouped_codes(self) -> GroupedCodes:
        return GroupedCodes(
            codes=self.codes.view(torch.uint8) ^ 128,
            bits=8,
            table=SIGNED_BYTES,
            scale=PlainValues(stored=self.absmax.unsqueeze(1)),
            group_size=self.shape[1],
            factor=1 / 127,
        )

    def stored_tensors(self) -> dict[str, Tensor]:
        """As `StorableWeight`."""
        # 0 says that the codes lie by rows; other numbers were layouts of GPU kernels that are no more.
        return {"weight": self.codes, "SCB": self.absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _decode(codes: Tensor, absmax: Tensor) -> Tensor:
    # In this order, and by the reciprocal, to round as bitsandbytes does.
    return codes.float().mul_(absmax.unsqueeze(1)).mul_(1 / 127)
