"""What formats have in common whose rows can be taken apart without decoding them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.quantization.column_part import dense_columns
from graftlm.quantization.dequantized import decode_in_slabs, dequantized_matmul
from graftlm.quantization.weight import Weight


@dataclass(frozen=True, kw_only=True, eq=False)
class RowWeight(ABC):
    """A `Weight` in terms of two operations: pick rows in their stored form, and decode all there are.

    dtype: the compute dtype.
    """

    dtype: torch.dtype

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @property
    @abstractmethod
    def format(self) -> str: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def pick(self, rows: slice | Tensor) -> Self:
        """Some of the rows, still stored as they are; those of a slice share memory. rows: a slice, or int64 [T]."""

    @abstractmethod
    def decode(self) -> Tensor:
        """The matrix in float32, with intermediate tensors of its size."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dequantized_matmul(self, x, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.pick(ids).dequantize()

    def part(self, start: int, stop: int) -> Self:
        return self.pick(slice(start, stop))

    def column_part(self, start: int, stop: int) -> Weight:
        return dense_columns(self, start, stop)

    def dequantize(self) -> Tensor:
        return decode_in_slabs(
            lambda start, stop: self.part(start, stop).decode(), shape=self.shape, dtype=self.dtype, device=self.device
        )

    def grouped_codes(self) -> GroupedCodes | None:
        return None
