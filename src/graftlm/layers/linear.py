"""A linear layer that carries adapters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.patch import Segment, Slot
from graftlm.quantization import Weight


class Linear:
    """y = x @ W.T + bias, plus each segment's patch. One object may hold several projections stacked (q, k and v)."""

    def __init__(self, slot: Slot, weight: Weight, bias: Tensor | None = None) -> None:
        self.slot = slot
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """x: [T, in] -> [T, out]."""
        out = self.weight.matmul(x, self.bias)
        updates = [
            ops.LoraSegment(segment.start, segment.stop, patch.low_rank)
            for segment in segments
            if (patch := segment.patches.get(self.slot)) is not None
        ]
        if updates:
            ops.lora(out, x, updates)
        return out
