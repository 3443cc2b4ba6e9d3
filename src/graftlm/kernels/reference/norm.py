"""Normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm as Llama computes it.

    Semantics: x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, then times weight.
    Args: x: [..., E]. weight: [E].
    Source: arXiv 1910.07467; transformers' LlamaRMSNorm, whose cast before the product matters in bfloat16.
    """
    normed = functional.rms_norm(x.float(), (x.shape[-1],), eps=eps)
    return normed.to(x.dtype).mul_(weight)
