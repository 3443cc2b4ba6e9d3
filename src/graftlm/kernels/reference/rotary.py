"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position, half-split layout.

    Semantics: with x1, x2 = the halves of the last dimension: [x1*cos - x2*sin, x2*cos + x1*sin].
    Args: x: [T, H, D]. cos, sin: [T, 1, D/2], in x's dtype (as transformers casts them).
    Returns: [T, H, D].
    Source: RoFormer, arXiv 2104.09864; the half-split layout is transformers' `rotate_half`.
    """
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out
