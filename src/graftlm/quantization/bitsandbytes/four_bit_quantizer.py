"""Making 4-bit weights of full-precision ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.quantization.bitsandbytes.block_quantization import quantize_four_bit, quantize_scales
from graftlm.quantization.bitsandbytes.block_scales import BlockScales, NestedScales, PlainScales
from graftlm.quantization.bitsandbytes.code_tables import FourBitType, dynamic_table, four_bit_table
from graftlm.quantization.bitsandbytes.four_bit_weight import FourBitWeight
from graftlm.quantization.bitsandbytes.slab import SLAB_ELEMENTS

# Scales that share a scale, where scales are quantised.
NESTED_BLOCK_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class FourBitQuantizer:
    """A `Quantizer` to NF4 or FP4. Codes and scales are those of bitsandbytes 0.50 on CPU, bit for bit.

    block_size: one of bitsandbytes' 32, 64, … 4096.
    double: quantise the scales as well.
    """

    quant_type: FourBitType
    double: bool = False
    block_size: int = 64

    def quantize(self, matrix: Tensor, *, dtype: torch.dtype) -> FourBitWeight:
        rows, columns = matrix.shape
        num_elements = rows * columns
        device = matrix.device
        table = four_bit_table(self.quant_type).to(device)
        codes = torch.empty(-(-num_elements // 2), dtype=torch.uint8, device=device)
        absmax = torch.empty(-(-num_elements // self.block_size), dtype=torch.float32, device=device)
        # Slabs of rows that end where a block ends.
        step = self.block_size // math.gcd(self.block_size, columns)
        step *= max(1, SLAB_ELEMENTS // (step * columns))
        for start in range(0, rows, step):
            values = matrix[start : start + step].reshape(-1).float()
            slab_codes, slab_absmax = quantize_four_bit(values, table, self.block_size)
            first = start * columns
            codes[first // 2 :][: slab_codes.numel()] = slab_codes
            absmax[first // self.block_size :][: slab_absmax.numel()] = slab_absmax
        return FourBitWeight(
            shape=(rows, columns),
            codes=codes,
            scales=_nested(absmax) if self.double else PlainScales(absmax=absmax),
            table=table,
            quant_type=self.quant_type,
            block_size=self.block_size,
            dtype=dtype,
        )


def _nested(absmax: Tensor) -> BlockScales:
    offset = absmax.mean()
    table = dynamic_table().to(absmax.device)
    codes, nested_absmax = quantize_scales(absmax - offset, table, NESTED_BLOCK_SIZE)
    return NestedScales(
        codes=codes, table=table, absmax=nested_absmax, offset=offset.item(), block_size=NESTED_BLOCK_SIZE
    )
