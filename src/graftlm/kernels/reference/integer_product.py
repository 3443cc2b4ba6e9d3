"""The product of two matrices of eight-bit integers, exact whatever its size."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Columns whose sum is exact in float32: 1024 * 128 * 128 = 2**24.
EXACT_COLUMNS = 1024
# Columns whose sum an int32 holds whatever the codes.
MAX_INTEGER_COLUMNS = (1 << 17) - 1


def integer_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Semantics: out[t, n] = sum over k of x[t, k] * weight[n, k], exactly; so no row depends on any other.

    Args:
        x: [T, in] int8. weight: [out, in] int8; in is at most `MAX_INTEGER_COLUMNS`.

    Returns: [T, out] int32.
    """
    if x.device.type == "cpu" and _int_mm_is_exact():
        return torch._int_mm(x, weight.t())
    return by_exact_floats(x, weight)


def by_exact_floats(x: Tensor, weight: Tensor) -> Tensor:
    """As `integer_matmul`, on any device: each partial sum is an integer that float32, and TF32's operands, hold."""
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT_COLUMNS):
        span = slice(start, start + EXACT_COLUMNS)
        out += (x[:, span].float() @ weight[:, span].float().t()).int()
    return out


@cache
def _int_mm_is_exact() -> bool:
    """Processors without VNNI add pairs of products in 16 bits, and saturate."""
    extreme = torch.full((32, 64), -128, dtype=torch.int8)
    return bool((torch._int_mm(extreme, extreme.t()) == 64 * 128 * 128).all())
