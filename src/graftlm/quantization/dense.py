"""Full-precision weights: float32, bfloat16, float16."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from graftlm.kernels import ops
from graftlm.kernels.grouped_codes import GroupedCodes


class DenseWeight:
    """A `Weight` that is its own dequantised form."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._matrix.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        return self._matrix.nbytes

    @property
    def format(self) -> str:
        return str(self._matrix.dtype).removeprefix("torch.")

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, self._matrix, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self._matrix)

    def part(self, start: int, stop: int) -> DenseWeight:
        return DenseWeight(self._matrix[start:stop])

    def column_part(self, start: int, stop: int) -> DenseWeight:
        return DenseWeight(self._matrix[:, start:stop].contiguous())

    def dequantize(self) -> Tensor:
        return self._matrix

    def grouped_codes(self) -> GroupedCodes | None:
        return None
