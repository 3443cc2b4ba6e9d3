"""Weights in the order that the kernels read them in."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.kernels.kernel_set import Kernels, PackedMatrix
from graftlm.quantization.column_part import dense_columns
from graftlm.quantization.dense import DenseWeight
from graftlm.quantization.dequantized import dequantized_matmul, frozen_matmul
from graftlm.quantization.weight import Weight

# Codes of 3, 5 or 6 bits grow to 4 or 8 when they are laid out, which takes up to 1.64 times the memory (Q5_K). Codes
# of 2 bits would double: they stay as they are stored, and slow.
LARGEST_GROWTH = 1.75


def dense_weight(matrix: Tensor, kernels: Kernels) -> Weight:
    """A full-precision weight, laid out for the kernels where they have an order of their own; no second copy is kept.

    matrix: [out, in]. kernels: those that will compute with it.
    """
    packed = kernels.pack(matrix)
    if packed is None:
        return DenseWeight(matrix)
    return PackedWeight(packed, format=str(matrix.dtype).removeprefix("torch."))


def coded_weight(weight: Weight, kernels: Kernels, *, dtype: torch.dtype) -> Weight:
    """A weight laid out for the kernels, if it is made of codes and they have a product with such; else itself. The
    stored form is not kept.

    dtype: the compute dtype. kernels: those that will compute with it.
    """
    codes = None if kernels.pack_codes is None else weight.grouped_codes()
    if kernels.pack_codes is None or codes is None:
        return weight
    matrix = kernels.pack_codes(codes, dtype)
    if matrix is None or matrix.num_bytes > LARGEST_GROWTH * weight.num_bytes:
        return weight
    return PackedWeight(matrix, format=weight.format)


class PackedWeight:
    """A `Weight` in an order of the kernels' own. Of codes the product applies scales to sums over their groups; `rows`
    and `dequantize` give what the format defines, to the bit.

    format: what it was stored as.
    """

    def __init__(self, matrix: PackedMatrix, *, format: str) -> None:
        self._matrix = matrix
        self.format = format

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    @property
    def num_bytes(self) -> int:
        return self._matrix.num_bytes

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != self._matrix.dtype:
            return dequantized_matmul(self, x, bias)
        return frozen_matmul(x, bias, self._matrix.linear, self._matrix.turned_linear)

    def rows(self, ids: Tensor) -> Tensor:
        return self._matrix.rows(ids)

    def part(self, start: int, stop: int) -> DenseWeight:
        """A dequantised copy: rows of a panel lie between each other."""
        return DenseWeight(self.rows(torch.arange(start, stop)))

    def column_part(self, start: int, stop: int) -> DenseWeight:
        return dense_columns(self, start, stop)

    def dequantize(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0]))

    def grouped_codes(self) -> GroupedCodes | None:
        return None
