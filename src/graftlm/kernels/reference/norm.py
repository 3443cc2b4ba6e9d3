"""Sums of branches, and normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from graftlm.kernels.reference.precision import widened


def add(branch: Tensor, residual: Tensor) -> Tensor:
    """`ops.add`. Differentiable."""
    return branch + residual


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`ops.rms_norm`. Differentiable."""
    normed = functional.rms_norm(widened(x), (x.shape[-1],), eps=eps)
    if weight is None:
        return normed.to(x.dtype)
    if weight.dtype == x.dtype:
        return normed.to(x.dtype).mul_(weight)
    return normed.mul_(weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`ops.layer_norm`. Differentiable."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_rms_norm(branch: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.add_rms_norm`. Differentiable."""
    total = branch + residual
    return total, rms_norm(total, weight, eps)


def add_layer_norm(
    branch: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`ops.add_layer_norm`. Differentiable."""
    total = branch + residual
    return total, layer_norm(total, weight, bias, eps)
