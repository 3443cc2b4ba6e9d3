"""Rotary position embedding, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch


class Angles(NamedTuple):
    """Of T tokens: [T, 1, R/2] each, in the dtype of what they turn."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Angles of a set of frequencies. Each token is turned by its own position; nothing depends on the batch.

    inverse_frequencies: [R/2] float32. attention_factor scales cos and sin (YaRN-style temperature; 1 for most).
    """

    def __init__(self, inverse_frequencies: Tensor, attention_factor: float = 1.0) -> None:
        self._inverse_frequencies = inverse_frequencies
        self._attention_factor = attention_factor

    def angles(self, batch: RaggedBatch, dtype: torch.dtype) -> Angles:
        """Computed in float32 and cast, as transformers does."""
        phases = batch.positions.to(torch.float32)[:, None, None] * self._inverse_frequencies
        cos, sin = phases.cos(), phases.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return Angles(cos.to(dtype), sin.to(dtype))

    @staticmethod
    def rotate(x: Tensor, angles: Angles) -> Tensor:
        """x: [T, H, D] turned by the angles of its tokens."""
        return ops.apply_rotary(x, *angles)
