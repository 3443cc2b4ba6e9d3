"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.apply_rotary`. Differentiable."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)
