"""Normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from graftlm.kernels.reference.precision import widened


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm.

    Semantics: x / sqrt(mean(x^2) + eps) in float32 (float64 stays), then times weight. The weight's dtype says where
    the result is rounded: a weight in x's dtype is applied after the cast to it (Llama), a float32 weight before
    (Gemma, OLMo-2).
    Args: x: [..., E]. weight: [E], x's dtype or float32; None for none.
    Returns: x's shape and dtype.
    Source: arXiv 1910.07467; transformers' LlamaRMSNorm and GemmaRMSNorm.
    """
    normed = functional.rms_norm(widened(x), (x.shape[-1],), eps=eps)
    if weight is None:
        return normed.to(x.dtype)
    if weight.dtype == x.dtype:
        return normed.to(x.dtype).mul_(weight)
    return normed.mul_(weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension.

    Semantics: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.
    Args: x: [..., E]. weight, bias: [E], x's dtype; None for none.
    Source: arXiv 1607.06450; torch.nn.LayerNorm.
    """
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
