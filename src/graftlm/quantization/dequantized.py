"""Quantised matrices by way of their full-precision form, a slab of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.quantization.weight import Weight

# Elements dequantised at once: 16 MB in float32, so that the copy does not outgrow what quantising saved.
SLAB_ELEMENTS = 1 << 22


def dequantized_matmul(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """x @ W.T + bias, as `Weight.matmul`: what every format can do. x: [T, in] -> [T, out]."""
    out_features, in_features = weight.shape
    step = max(1, SLAB_ELEMENTS // in_features)
    if step >= out_features:
        return functional.linear(x, weight.dequantize(), bias)
    slabs = []
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        part = None if bias is None else bias[start:stop]
        slabs.append(functional.linear(x, weight.part(start, stop).dequantize(), part))
    return torch.cat(slabs, dim=1)


def decode_in_slabs(
    decode: Callable[[int, int], Tensor], *, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A matrix [rows, columns] from a function that makes its rows [start, stop), in any dtype."""
    num_rows, num_columns = shape
    step = max(1, SLAB_ELEMENTS // num_columns)
    matrix = torch.empty(shape, dtype=dtype, device=device)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        matrix[start:stop] = decode(start, stop)
    return matrix
