"""Activations of the MLP, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _silu(x: Tensor) -> Tensor:
    return functional.silu(x, inplace=not x.requires_grad)


def _relu(x: Tensor) -> Tensor:
    return functional.relu(x, inplace=not x.requires_grad)


FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """`ops.activate`. Differentiable."""
    return FUNCTIONS[activation](x)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """`ops.gated_activation`. Differentiable."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = activate(gate, activation)
    return activated * up if gate_up.requires_grad else activated.mul_(up)
