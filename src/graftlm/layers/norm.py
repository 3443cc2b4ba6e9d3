"""Normalisation layers, of which an adapter may have its own weights."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.patch import Slot
from graftlm.layers.segments import Segments


class Norm(Protocol):
    """A norm over the last dimension. weight, bias: [E], as they are on disk."""

    @property
    def slot(self) -> Slot: ...

    @property
    def weight(self) -> Tensor | None: ...

    @property
    def bias(self) -> Tensor | None: ...

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x: [T, ..., E] -> the same shape and dtype."""
        ...

    def of_sum(self, branch: Tensor, residual: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """branch + residual, and the norm of it. branch: [T, E], not to be used any more. residual: [T, E]."""
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

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        out = ops.rms_norm(x, self._gain, self._eps)
        self._patch(out, x, segments)
        return out

    def of_sum(self, branch: Tensor, residual: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        total, out = ops.add_rms_norm(branch, residual, self._gain, self._eps)
        self._patch(out, total, segments)
        return total, out

    def _patch(self, out: Tensor, x: Tensor, segments: Segments) -> None:
        for segment in segments.with_norms:
            patch = segment.patch.norms.get(self.slot)
            if patch is not None:
                span = slice(segment.start, segment.stop)
                out[span] = ops.rms_norm(x[span], self._gain_of(patch.weight), self._eps)

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

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        out = ops.layer_norm(x, self.weight, self.bias, self._eps)
        self._patch(out, x, segments)
        return out

    def of_sum(self, branch: Tensor, residual: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        total, out = ops.add_layer_norm(branch, residual, self.weight, self.bias, self._eps)
        self._patch(out, total, segments)
        return total, out

    def _patch(self, out: Tensor, x: Tensor, segments: Segments) -> None:
        for segment in segments.with_norms:
            patch = segment.patch.norms.get(self.slot)
            if patch is not None:
                span = slice(segment.start, segment.stop)
                out[span] = ops.layer_norm(x[span], patch.weight, patch.bias, self._eps)


def normed(x: Tensor, norm: Norm | None, segments: Segments) -> Tensor:
    """x under a norm, where there is one."""
    return x if norm is None else norm(x, segments)


def added(branch: Tensor, residual: Tensor, norm: Norm | None, segments: Segments) -> tuple[Tensor, Tensor]:
    """branch + residual, and that under a norm, where there is one. branch: not to be used any more."""
    if norm is not None:
        return norm.of_sum(branch, residual, segments)
    total = ops.add(branch, residual)
    return total, total
