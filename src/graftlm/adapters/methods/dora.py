"""DoRA: a weight's rows keep their direction from the base and the low-rank update, and get a length of their own.

Source: arXiv 2402.09353; peft/tuners/lora/dora.py (0.21).
"""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.transforms import Affine


def dora_scale(magnitude: Tensor, weight: Tensor, factor_a: Tensor, factor_b: Tensor) -> Tensor:
    """What the output is multiplied with, [out]: magnitude over the length of the adapted rows.

    Args:
        magnitude: [out]. weight: [out, in]. factor_a: [R, in]. factor_b: [out, R], with the scaling multiplied in.

    The length counts as a constant when gradients are taken (section 4.3 of the paper).
    """
    with torch.no_grad():
        length: Tensor = torch.linalg.vector_norm(ops.widened(weight) + factor_b @ factor_a, dim=1)
    return magnitude / length


def dora_output(scale: Tensor, bias: Tensor | None) -> Affine:
    """The transform of the base's output that `scale` asks for: the bias is not scaled, (W x + b) * g + (b - b * g)."""
    return Affine(scale=scale, shift=None if bias is None else ops.widened(bias) * (1 - scale))
