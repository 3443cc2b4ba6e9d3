"""Feed-forward layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.linear import Linear
from graftlm.layers.segments import Segments


class FeedForward(Protocol):
    """The part of a decoder layer that sees one token at a time."""

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x: [T, E] -> [T, E]."""
        ...


class MLP:
    """down(activation(up(x)))."""

    def __init__(self, *, up: Linear, down: Linear, activation: ops.Activation) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        return self._down(ops.activate(self._up(x, segments), self._activation), segments)


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate and up are one fused projection, in that order."""

    def __init__(self, *, gate_up: Linear, down: Linear, activation: ops.Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        return self._down(ops.gated_activation(self._gate_up(x, segments), self._activation), segments)


class ClampedMLP:
    """down(clamped_swiglu(gate_up(x))); gate and up are one fused projection, in alternate columns."""

    def __init__(self, *, gate_up: Linear, down: Linear, alpha: float, limit: float) -> None:
        self._gate_up = gate_up
        self._down = down
        self._alpha = alpha
        self._limit = limit

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        gated = ops.clamped_swiglu(self._gate_up(x, segments), alpha=self._alpha, limit=self._limit)
        return self._down(gated, segments)
