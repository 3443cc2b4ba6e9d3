"""The precision that sums, norms and logits are computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in float32, or as it is if it is float64, in which gradients are checked. Not copied if nothing changes."""
    return x if x.dtype == torch.float64 else x.float()
