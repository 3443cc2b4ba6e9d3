"""The scales of a block-quantised matrix, one per block, as float32 or quantised once more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from graftlm.kernels.grouped_codes import CodedValues, GroupValues, PlainValues


class BlockScales(Protocol):
    """One float32 scale per block, in the order of the flattened matrix."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_nested(self) -> bool:
        """Whether the scales are quantised themselves."""
        ...

    def at(self, blocks: Tensor) -> Tensor:
        """Scales of some blocks. blocks: int64, any shape -> float32, same shape."""
        ...

    def by_row(self, rows: int) -> GroupValues:
        """The same, where every row is as many whole blocks."""
        ...

    def part(self, start: int, stop: int) -> BlockScales:
        """The scales of blocks [start, stop), sharing this one's memory."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainScales:
    """Scales as they are.

    absmax: float32 [blocks].
    """

    absmax: Tensor

    @property
    def num_bytes(self) -> int:
        return self.absmax.nbytes

    @property
    def is_nested(self) -> bool:
        return False

    def at(self, blocks: Tensor) -> Tensor:
        return self.absmax[blocks]

    def by_row(self, rows: int) -> PlainValues:
        return PlainValues(stored=self.absmax.view(rows, -1))

    def part(self, start: int, stop: int) -> PlainScales:
        return PlainScales(absmax=self.absmax[start:stop])


@dataclass(frozen=True, kw_only=True, eq=False)
class NestedScales:
    """Doubly quantised scales: scale[b] = table[codes[b]] * absmax[(skip + b) // block_size] + offset.

    codes: uint8 [blocks].
    table: float32 [256].
    absmax: float32, one per `block_size` scales.
    skip: how many scales of the first group stand before `codes`; not zero only in parts.
    """

    codes: Tensor
    table: Tensor
    absmax: Tensor
    offset: float
    block_size: int
    skip: int = 0

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.table.nbytes + self.absmax.nbytes

    @property
    def is_nested(self) -> bool:
        return True

    def at(self, blocks: Tensor) -> Tensor:
        groups = (blocks + self.skip) // self.block_size
        return self.table[self.codes[blocks].int()] * self.absmax[groups] + self.offset

    def by_row(self, rows: int) -> CodedValues:
        return CodedValues(
            codes=self.codes.view(rows, -1),
            table=self.table,
            factors=self.absmax,
            block_size=self.block_size,
            skip=self.skip,
            offset=self.offset,
        )

    def part(self, start: int, stop: int) -> NestedScales:
        first, last = self.skip + start, self.skip + stop
        first_group = first // self.block_size
        return replace(
            self,
            codes=self.codes[start:stop],
            absmax=self.absmax[first_group : -(-last // self.block_size)],
            skip=first - first_group * self.block_size,
        )
