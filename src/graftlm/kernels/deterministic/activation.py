"""Activations of the MLP, plain and gated."""

from __future__ import annotations

from torch import Tensor

from graftlm.kernels.deterministic.elementwise import elementwise
from graftlm.kernels.reference.activation import FUNCTIONS, Activation


def activate(x: Tensor, activation: Activation) -> Tensor:
    """`ops.activate`."""
    return elementwise(FUNCTIONS[activation], x)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """`ops.gated_activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)
