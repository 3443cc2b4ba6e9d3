"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position, half-split layout.

    Semantics: with x1, x2 = the halves of the first R dimensions: [x1*cos - x2*sin, x2*cos + x1*sin]; dimensions from R
    on are copied (partial rotary).
    Args: x: [T, H, D]. cos, sin: [T, 1, R/2], in x's dtype (as transformers casts them).
    Returns: [T, H, D].
    Source: RoFormer, arXiv 2104.09864; the half-split layout is transformers' `rotate_half`.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)
