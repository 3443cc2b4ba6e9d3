"""Gated activations of the MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def gated_activation(gate_up: Tensor) -> Tensor:
    """SiLU of the first half times the second half.

    Semantics: with gate, up = the halves of the last dimension, silu(gate) * up.
    Args: gate_up: [T, 2F], gate before up. It is used as scratch and its content is lost.
    Returns: [T, F].
    Source: SwiGLU, arXiv 2002.05202.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)
