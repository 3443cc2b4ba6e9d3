"""Columns of matrices whose format cannot cut rows apart."""

from __future__ import annotations

from graftlm.quantization.dense import DenseWeight
from graftlm.quantization.weight import Weight


def dense_columns(weight: Weight, start: int, stop: int) -> DenseWeight:
    """Columns [start, stop) in full precision, a copy."""
    return DenseWeight(weight.dequantize()[:, start:stop].contiguous())
