"""Matrices of small integers that stand for numbers, a scale for each group of a row's columns: what most quantised
formats are in other words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

# What codes stand for where they are integers, the middle code zero.
SIGNED_NIBBLES = torch.arange(-8.0, 8.0)
SIGNED_BYTES = torch.arange(-128.0, 128.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainValues:
    """Numbers as they are.

    stored: [out, groups], a float dtype; or fewer rows, if rows of the matrix have theirs in common.
    row_groups: int32 [out], the row of `stored` that each row of the matrix has its numbers from; None for its own.
    """

    stored: Tensor
    row_groups: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.stored.nbytes + (0 if self.row_groups is None else self.row_groups.nbytes)

    def values(self) -> Tensor:
        values = self.stored.float()
        return values if self.row_groups is None else values[self.row_groups]

    def joined(self, count: int) -> PlainValues:
        """As `GroupedCodes.joined`."""
        stored = self.stored if self.row_groups is None else self.stored[self.row_groups]
        return PlainValues(stored=stored.view(-1, count * stored.shape[1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedValues:
    """Numbers that are quantised themselves.

    Semantics: value[n, g] = table[codes[n, g]] * factors[(n * groups + g + skip) // block_size] + offset.

    codes: uint8 [out, groups]. table: float32 [256].
    factors: float32, one for every `block_size` numbers of all rows in order, or one for all where that is None.
    skip: how many numbers of the first block stand before the matrix.
    """

    codes: Tensor
    table: Tensor
    factors: Tensor
    block_size: int | None = None
    skip: int = 0
    offset: float = 0.0

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.table.nbytes + self.factors.nbytes

    def values(self) -> Tensor:
        device = self.codes.device
        values = self.table.to(device)[self.codes.int()]
        factors = self.factors.to(device)
        if self.block_size is None:
            values *= factors
        else:
            places = torch.arange(self.codes.numel(), device=device).view(self.codes.shape) + self.skip
            values *= factors[places // self.block_size]
        return values.add_(self.offset) if self.offset else values

    def joined(self, count: int) -> CodedValues:
        """As `GroupedCodes.joined`."""
        return replace(self, codes=self.codes.view(-1, count * self.codes.shape[1]))


GroupValues = PlainValues | CodedValues


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedCodes:
    """A matrix [out, in] by its codes.

    Semantics: w[n, k] = (table[code[n, k]] - zero[n, g]) * scale[n, g] * factor + minimum[n, g] in float32, one
    operation after the other, g = k // group_size; then column k moves to order[k].

    codes: uint8 [out, in], below 2**bits. bits: 4 or 8.
    table: float32 [2**bits], the numbers that codes stand for.
    zero: int16 [out, groups]. scale, minimum: of as many. factor: 1 where there is none.
    order: int64 [in], where the columns belong that are here sorted by their groups (act-order); None if in place.
    """

    codes: Tensor
    bits: int
    table: Tensor
    scale: GroupValues
    group_size: int
    zero: Tensor | None = None
    minimum: GroupValues | None = None
    factor: float = 1.0
    order: Tensor | None = None

    def decode(self) -> Tensor:
        """float32 [out, in]."""
        rows, columns = self.codes.shape
        size = min(self.group_size, columns)
        padded = functional.pad(self.codes, (0, -columns % size))
        matrix = self.table.to(padded.device)[padded.int()].view(rows, -(-columns // size), size)
        if self.zero is not None:
            matrix -= self.zero.float().unsqueeze(2)
        matrix *= self.scale.values().unsqueeze(2)
        if self.factor != 1.0:
            matrix *= self.factor
        if self.minimum is not None:
            matrix += self.minimum.values().unsqueeze(2)
        matrix = matrix.flatten(1)[:, :columns]
        return matrix if self.order is None else torch.empty_like(matrix).index_copy_(1, self.order, matrix)

    def joined(self, count: int) -> GroupedCodes:
        """The matrix whose rows are each `count` of this one's, one after the other."""
        return replace(
            self,
            codes=self.codes.view(-1, count * self.codes.shape[1]),
            scale=self.scale.joined(count),
            zero=None if self.zero is None else self.zero.view(-1, count * self.zero.shape[1]),
            minimum=None if self.minimum is None else self.minimum.joined(count),
        )
