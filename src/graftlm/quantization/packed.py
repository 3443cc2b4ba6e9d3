"""Full-precision weights in the order that the kernels read them in."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.kernels.kernel_set import Kernels, PackedMatrix
from graftlm.quantization.column_part import dense_columns
from graftlm.quantization.dense import DenseWeight
from graftlm.quantization.dequantized import frozen_matmul
from graftlm.quantization.weight import Weight


def dense_weight(matrix: Tensor, kernels: Kernels) -> Weight:
    """A full-precision weight, laid out for the kernels where they have an order of their own; no second copy is kept.

    matrix: [out, in]. kernels: those that will compute with it.
    """
    packed = kernels.pack(matrix)
    return DenseWeight(matrix) if packed is None else PackedWeight(packed)


class PackedWeight:
    """A `Weight` in an order of the kernels' own."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    @property
    def num_bytes(self) -> int:
        return self._matrix.num_bytes

    @property
    def format(self) -> str:
        return str(self._matrix.dtype).removeprefix("torch.")

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return frozen_matmul(x, bias, self._matrix.linear, self._matrix.turned_linear)

    def rows(self, ids: Tensor) -> Tensor:
        return self._matrix.rows(ids)

    def part(self, start: int, stop: int) -> DenseWeight:
        """A copy: rows of a panel lie between each other."""
        return DenseWeight(self._matrix.rows(torch.arange(start, stop)))

    def column_part(self, start: int, stop: int) -> DenseWeight:
        return dense_columns(self, start, stop)

    def dequantize(self) -> Tensor:
        return self._matrix.rows(torch.arange(self.shape[0]))

    def grouped_codes(self) -> GroupedCodes | None:
        return None
