"""Normalisation layers."""

from __future__ import annotations

from torch import Tensor

from graftlm.kernels import ops


class RMSNorm:
    """Root-mean-square norm with a weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., E] -> the same shape and dtype."""
        return ops.rms_norm(x, self._weight, self._eps)
