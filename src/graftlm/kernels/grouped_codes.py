"""Matrices of small integers that stand for numbers, a scale for each group of a row's columns: what most quantised
formats are in other words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

# What codes stand for where they are integers, the middle code zero; of eight bits no other table has a fast product.
SIGNED_NIBBLES = torch.arange(-8.0, 8.0)
SIGNED_BYTES = torch.arange(-128.0, 128.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainValues:
    """Numbers as they are.

    stored: [out, groups], a float dtype.
    """

    stored: Tensor

    @property
    def num_bytes(self) -> int:
        return self.stored.nbytes

    def values(self) -> Tensor:
        return self.stored.float()

    def joined(self, count: int) -> PlainValues:
        """As `GroupedCodes.joined`."""
        return PlainValues(stored=self.stored.view(-1, count * self.stored.shape[1]))


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
        return self.at(torch.arange(self.codes.shape[0], device=self.codes.device), self.codes)

    def joined(self, count: int) -> CodedValues:
        """As `GroupedCodes.joined`."""
        return replace(self, codes=self.codes.view(-1, count * self.codes.shape[1]))

    def at(self, rows: Tensor, codes: Tensor) -> Tensor:
        """Those of some rows. rows: int64 [T]. codes: uint8 [T, groups], theirs -> float32 [T, groups]."""
        groups = codes.shape[1]
        device = codes.device
        values = self.table.to(device)[codes.int()]
        if self.block_size is None:
            values *= self.factors.to(device)
        else:
            places = rows.unsqueeze(1) * groups + torch.arange(groups, device=device) + self.skip
            values *= self.factors.to(device)[places // self.block_size]
        return values.add_(self.offset) if self.offset else values


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
        return self.combine(
            self.codes,
            scale=self.scale.values(),
            zero=self.zero,
            minimum=None if self.minimum is None else self.minimum.values(),
        )

    def combine(self, codes: Tensor, *, scale: Tensor, zero: Tensor | None, minimum: Tensor | None) -> Tensor:
        """What rows stand for. codes: uint8 [T, in]. scale, zero, minimum: [T, groups] -> float32 [T, in]."""
        rows, columns = codes.shape
        size = min(self.group_size, columns)
        padded = functional.pad(codes, (0, -columns % size))
        matrix = self.table.to(codes.device)[padded.int()].view(rows, -(-columns // size), size)
        if zero is not None:
            matrix -= zero.float().unsqueeze(2)
        matrix *= scale.unsqueeze(2)
        if self.factor != 1.0:
            matrix *= self.factor
        if minimum is not None:
            matrix += minimum.unsqueeze(2)
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
