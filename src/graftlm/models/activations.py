"""transformers' names of activations."""

from __future__ import annotations

from graftlm.models.spec import Activation

# `gelu_new` is the same formula as `gelu_pytorch_tanh`, written out.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
