"""Matrices of 4-bit codes with a scale per block of the flattened matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.quantization.bitsandbytes.block_scales import BlockScales, NestedScales, PlainScales
from graftlm.quantization.bitsandbytes.code_tables import FourBitType
from graftlm.quantization.bitsandbytes.quant_state import NestedState, QuantState
from graftlm.quantization.column_part import dense_columns
from graftlm.quantization.dequantized import decode_in_slabs, dequantized_matmul
from graftlm.quantization.weight import Weight


@dataclass(frozen=True, kw_only=True, eq=False)
class FourBitWeight:
    """A `Weight` of 4-bit codes: w[e] = table[code[e]] * scale[e // block_size] for element e of the matrix flattened
    by rows, computed in float32 and rounded once to `dtype`. Blocks ignore where rows end.

    codes: uint8 [ceil((skip + out * in) / 2)], two codes per byte, the earlier element in the high bits.
    scales: one per block.
    table: float32 [16].
    block_size: even.
    dtype: the compute dtype.
    skip: how many elements of the first block stand before the matrix; not zero only in parts.

    Source: QLoRA, arXiv 2305.14314; the layout is bitsandbytes'.
    """

    shape: tuple[int, int]
    codes: Tensor
    scales: BlockScales
    table: Tensor
    quant_type: FourBitType
    block_size: int
    dtype: torch.dtype
    skip: int = 0

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.num_bytes + self.table.nbytes

    @property
    def quantization(self) -> str:
        """The name of the quantiser that makes such weights."""
        return f"{self.quant_type}-double" if self.scales.is_nested else self.quant_type

    @property
    def format(self) -> str:
        return f"{self.quantization}, blocks of {self.block_size}"

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dequantized_matmul(self, x, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return decode_in_slabs(
            lambda start, stop: self._gather(ids[start:stop]),
            shape=(len(ids), self.shape[1]),
            dtype=self.dtype,
            device=self.codes.device,
        )

    def part(self, start: int, stop: int) -> FourBitWeight:
        columns = self.shape[1]
        first, last = self.skip + start * columns, self.skip + stop * columns
        first_block = first // self.block_size
        origin = first_block * self.block_size
        return replace(
            self,
            shape=(stop - start, columns),
            codes=self.codes[origin // 2 : (last + 1) // 2],
            scales=self.scales.part(first_block, -(-last // self.block_size)),
            skip=first - origin,
        )

    def column_part(self, start: int, stop: int) -> Weight:
        """Scales that were quantised themselves become float32."""
        rows, columns = self.shape
        size = self.block_size
        if self.skip or start % size or stop % size or columns % size:
            return dense_columns(self, start, stop)
        codes = self.codes.view(rows, columns // 2)[:, start // 2 : stop // 2]
        blocks = torch.arange(rows * columns // size, device=codes.device).view(rows, -1)
        scales = self.scales.at(blocks[:, start // size : stop // size].flatten())
        return replace(
            self, shape=(rows, stop - start), codes=codes.flatten(), scales=PlainScales(absmax=scales.contiguous())
        )

    def dequantize(self) -> Tensor:
        return decode_in_slabs(
            lambda start, stop: self.part(start, stop)._decode(),
            shape=self.shape,
            dtype=self.dtype,
            device=self.codes.device,
        )

    def grouped_codes(self) -> GroupedCodes | None:
        rows, columns = self.shape
        if self.skip or columns % self.block_size:
            return None
        return GroupedCodes(
            codes=torch.stack([self.codes >> 4, self.codes & 15], dim=1).view(rows, columns),
            bits=4,
            table=self.table,
            scale=self.scales.by_row(rows),
            group_size=self.block_size,
        )

    def stored_tensors(self) -> dict[str, Tensor]:
        """As `StorableWeight`.

        Raises:
            ValueError: this is a part that begins inside a block; the format has no place for that.
        """
        if self.skip or (isinstance(self.scales, NestedScales) and self.scales.skip):
            raise ValueError("a part that begins inside a block has no stored form")
        tensors = {"weight": self.codes.unsqueeze(1), "weight.quant_map": self.table}
        nested = None
        if isinstance(self.scales, NestedScales):
            tensors["weight.absmax"] = self.scales.codes
            tensors["weight.nested_absmax"] = self.scales.absmax
            tensors["weight.nested_quant_map"] = self.scales.table
            nested = NestedState(block_size=self.scales.block_size, offset=self.scales.offset)
        elif isinstance(self.scales, PlainScales):
            tensors["weight.absmax"] = self.scales.absmax
        state = QuantState(
            quant_type=self.quant_type, block_size=self.block_size, dtype=self.dtype, shape=self.shape, nested=nested
        )
        tensors[f"weight.{state.tensor_name}"] = state.to_tensor()
        return tensors

    @cached_property
    def _pairs(self) -> Tensor:
        """float32 [256, 2]: the two values a byte of codes stands for."""
        byte = torch.arange(256, device=self.table.device)
        return torch.stack([self.table[byte >> 4], self.table[byte & 15]], dim=1)

    def _unpack(self, codes: Tensor) -> Tensor:
        """uint8 [...] -> float32 [..., 2], without scales."""
        return self._pairs.index_select(0, codes.reshape(-1).int()).view(*codes.shape, 2)

    def _decode(self) -> Tensor:
        """The whole matrix in float32."""
        stop = self.skip + self.shape[0] * self.shape[1]
        num_blocks = -(-stop // self.block_size)
        values = self._unpack(self.codes).view(-1)
        scales = self.scales.at(torch.arange(num_blocks, device=values.device))
        num_full = stop // self.block_size
        full = num_full * self.block_size
        values[:full].view(num_full, self.block_size).mul_(scales[:num_full].unsqueeze(1))
        values[full:stop].mul_(scales[num_full:])
        return values[self.skip : stop].view(self.shape)

    def _gather(self, ids: Tensor) -> Tensor:
        """Some rows in float32."""
        num_rows, columns = self.shape
        # Where each row begins. Selecting refuses ids outside the matrix, also next to a part, where codes follow.
        begins = torch.arange(num_rows, device=ids.device).index_select(0, ids) * columns + self.skip
        # With odd rows every second one begins in the middle of a byte: one byte more holds either kind.
        num_pairs = columns // 2 + columns % 2
        pairs = (begins // 2).unsqueeze(1) + torch.arange(num_pairs, device=ids.device)
        values = self._unpack(self.codes[pairs])
        # Blocks are even, so both values of a byte have one scale.
        values.mul_(self.scales.at(pairs // (self.block_size // 2)).unsqueeze(-1))
        flat = values.flatten(1)
        if columns % 2:
            flat = torch.where((begins % 2).bool().unsqueeze(1), flat[:, 1:], flat[:, :-1])
        return flat
