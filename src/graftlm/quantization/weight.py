"""The one interface every weight format offers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes


class Weight(Protocol):
    """A matrix [out, in] in some storage format."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory the stored form takes."""
        ...

    @property
    def format(self) -> str:
        """What it is stored as, for people, such as "bfloat16" or "nf4, blocks of 64"."""
        ...

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ W.T + bias. x: [T, in] -> [T, out], in x's dtype."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix. ids: [T] int64 -> [T, in], in the compute dtype."""
        ...

    def part(self, start: int, stop: int) -> Weight:
        """Rows [start, stop) as a weight of their own, sharing this one's memory."""
        ...

    def column_part(self, start: int, stop: int) -> Weight:
        """Columns [start, stop) as a weight of their own: in this format where its blocks allow, else in full
        precision. A copy.

        Raises:
            ConfigurationError: their products do not add up to the whole's.
        """
        ...

    def dequantize(self) -> Tensor:
        """The whole matrix in the compute dtype, [out, in]."""
        ...

    def grouped_codes(self) -> GroupedCodes | None:
        """The matrix as codes that give `dequantize()`, to the bit, once cast; None where it is not made of such. Takes
        a byte for each element."""
        ...
