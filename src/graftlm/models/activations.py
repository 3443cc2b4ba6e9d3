"""transformers' names of activations."""

from __future__ import annotations

from graftlm.models.spec import Activation

# `gelu_new` and `gelu_fast` are the same formula as `gelu_pytorch_tanh`, written out; `gelu_python` is `gelu`.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
