"""Making int8 weights of full-precision ones."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.quantization.bitsandbytes.eight_bit_weight import EightBitWeight
from graftlm.quantization.bitsandbytes.slab import SLAB_ELEMENTS


class EightBitQuantizer:
    """A `Quantizer` to int8 by row. Codes and scales are those of bitsandbytes 0.50's `int8_vectorwise_quant`, bit for
    bit. (Its `Linear8bitLt` rounds the matrix to float16 before that, which Graft does not: it loses digits of float32
    and overflows for some of bfloat16's values.)"""

    def quantize(self, matrix: Tensor, *, dtype: torch.dtype) -> EightBitWeight:
        rows, columns = matrix.shape
        codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        absmax = torch.empty(rows, dtype=torch.float32, device=matrix.device)
        step = max(1, SLAB_ELEMENTS // columns)
        for start in range(0, rows, step):
            values = matrix[start : start + step].float()
            largest = values.abs().amax(dim=1)
            factors = 127.0 / largest
            # A row of zeros, or of numbers next to nothing, has no factor; its codes are zeros.
            factors = torch.where(factors.isinf(), 0.0, factors)
            codes[start : start + step] = (values * factors.unsqueeze(1)).round_()
            absmax[start : start + step] = largest
        return EightBitWeight(codes=codes, absmax=absmax, dtype=dtype)
