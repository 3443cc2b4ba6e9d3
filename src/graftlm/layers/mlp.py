"""The feed-forward block."""

from __future__ import annotations

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one fused projection, in that order."""

    def __init__(self, *, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        """x: [T, E] -> [T, E]."""
        return self.down(ops.gated_activation(self.gate_up(x, batch.segments)), batch.segments)
