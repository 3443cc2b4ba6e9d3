"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.patch import Segment, Slot


class RMSNorm:
    """Root-mean-square norm with a weight, which an adapter may have its own of."""

    def __init__(self, slot: Slot, weight: Tensor, eps: float) -> None:
        self.slot = slot
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """x: [T, E] -> the same shape and dtype."""
        out = ops.rms_norm(x, self.weight, self._eps)
        for segment in segments:
            weight = segment.patch.norms.get(self.slot)
            if weight is not None:
                rows = x[segment.start : segment.stop]
                out[segment.start : segment.stop] = ops.rms_norm(rows, weight, self._eps)
        return out
