"""Rotary position embedding, per token: each is turned by its own position, and nothing depends on its neighbours.

Angles are computed in float32 and cast, as transformers does. attention_factor scales cosines and sines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch


class Angles(NamedTuple):
    """Of T tokens: [T, 1, R/2] each, in the dtype of what they turn."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(Protocol):
    """Angles of a batch's tokens."""

    def angles(self, batch: RaggedBatch, dtype: torch.dtype) -> Angles: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedRotary:
    """One set of frequencies. inverse_frequencies: [R/2] float32, radians per position."""

    inverse_frequencies: Tensor
    attention_factor: float = 1.0

    def angles(self, batch: RaggedBatch, dtype: torch.dtype) -> Angles:
        return _angles(batch.positions, self.inverse_frequencies, self.attention_factor, dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicRotary:
    """Theta that grows with the length at which a token was computed (dynamic NTK).

    Semantics: L = max(prompt length, position + 1, context); theta' = theta * (factor * L / context - factor + 1) **
    (R / (R - 2)); frequencies theta' ** -exponents.
    exponents: [R/2] float32.
    Source: transformers/modeling_rope_utils.py, one sequence at a time.
    """

    theta: float
    exponents: Tensor
    factor: float
    context: int

    def angles(self, batch: RaggedBatch, dtype: torch.dtype) -> Angles:
        lens = torch.maximum(batch.prompt_lens, batch.positions + 1).clamp(min=self.context)
        dims = 2 * len(self.exponents)
        stretch = self.factor * lens.to(torch.float32) / self.context - (self.factor - 1)
        thetas = self.theta * ops.elementwise(lambda base: base ** (dims / (dims - 2)), stretch)
        wavelengths = ops.elementwise(torch.pow, thetas[:, None, None], self.exponents)
        return _angles(batch.positions, 1.0 / wavelengths, 1.0, dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class LongRotary:
    """One set of frequencies for sequences of up to `context` tokens, another for longer ones.

    short, long: [R/2] float32.
    """

    short: Tensor
    long: Tensor
    context: int
    attention_factor: float = 1.0

    def angles(self, batch: RaggedBatch, dtype: torch.dtype) -> Angles:
        is_long = (batch.sequence_lens > self.context)[:, None, None]
        return _angles(batch.positions, torch.where(is_long, self.long, self.short), self.attention_factor, dtype)


def _angles(positions: Tensor, inverse_frequencies: Tensor, attention_factor: float, dtype: torch.dtype) -> Angles:
    phases = positions.to(torch.float32)[:, None, None] * inverse_frequencies
    cos, sin = ops.elementwise(torch.cos, phases), ops.elementwise(torch.sin, phases)
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return Angles(cos.to(dtype), sin.to(dtype))
