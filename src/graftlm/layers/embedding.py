"""Token embedding."""

from __future__ import annotations

from torch import Tensor

from graftlm.quantization import Weight


class Embedding:
    """Rows of a [V, E] table, which may be the output head's weight too."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] int64 -> [T, E]."""
        return self._weight.rows(token_ids)
