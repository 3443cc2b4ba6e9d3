"""Functions of single elements."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def elementwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """`ops.elementwise` by torch's own. Differentiable."""
    return function(*operands)
