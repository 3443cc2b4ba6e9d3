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


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """`ops.activate`. Differentiable."""
    return _FUNCTIONS[activation](x)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """`ops.gated_activation`. Differentiable."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = activate(gate, activation)
    return activated * up if gate_up.requires_grad else activated.mul_(up)


def clamped_swiglu(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """GPT-OSS's gated activation.

    Semantics: with gate, up = the even and the odd columns, gate at most `limit`, up within +-limit:
        gate * sigmoid(alpha * gate) * (up + 1)
    Args: gate_up: [T, 2F].
    Returns: [T, F].
    Source: arXiv 2508.10925.
    """
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(min=-limit, max=limit)
    return gate * (gate * alpha).sigmoid() * (up + 1)
