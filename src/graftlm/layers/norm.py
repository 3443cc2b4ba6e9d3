"""Normalisation layers, of which an adapter may have its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.patch import Segment, Slot


class Norm(Protocol):
    """A norm over the last dimension. weight, bias: [E], as they are on disk."""

    @property
    def slot(self) -> Slot: ...

    @property
    def weight(self) -> Tensor | None: ...

    @property
    def bias(self) -> Tensor | None: ...

    def __call__(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """x: [T, ..., E] -> the same shape and dtype."""
        ...


class RMSNorm:
    """Root-mean-square norm.

    offset: added to the weight (Gemma stores the weight less one). float32_product: multiply before rounding.
    """

    def __init__(
        self, slot: Slot, weight: Tensor | None, eps: float, *, offset: float = 0.0, float32_product: bool = False
    ) -> None:
        self.slot = slot
        self.weight = weight
        self.bias = None
        self._eps = eps
        self._offset = offset
        self._float32_product = float32_product
        self._gain = None if weight is None else self._gain_of(weight)

    def __call__(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        out = ops.rms_norm(x, self._gain, self._eps)
        for segment in segments:
            patch = segment.patch.norms.get(self.slot)
            if patch is not None:
                span = slice(segment.start, segment.stop)
                out[span] = ops.rms_norm(x[span], self._gain_of(patch.weight), self._eps)
        return out

    def _gain_of(self, weight: Tensor) -> Tensor:
        if self._float32_product:
            return ops.widened(weight) + self._offset
        return weight + self._offset if self._offset else weight


class LayerNorm:
    """Layer norm, with or without weight and bias."""

    def __init__(self, slot: Slot, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.slot = slot
        self.weight = weight
        self.bias = bias
        self._eps = eps

    def __call__(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        out = ops.layer_norm(x, self.weight, self.bias, self._eps)
        for segment in segments:
            patch = segment.patch.norms.get(self.slot)
            if patch is not None:
                span = slice(segment.start, segment.stop)
                out[span] = ops.layer_norm(x[span], patch.weight, patch.bias, self._eps)
        return out


def normed(x: Tensor, norm: Norm | None, segments: Sequence[Segment]) -> Tensor:
    """x under a norm, where there is one."""
    return x if norm is None else norm(x, segments)
