"""Products with a matrix, as torch computes them: their bits depend on how many rows and threads there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`ops.linear`. Differentiable."""
    return functional.linear(x, weight, bias)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """`ops.join_columns`. Differentiable."""
    return torch.cat(tuple(parts), dim=1)


def grouped_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """`ops.grouped_matmul`. Differentiable."""
    return torch.einsum("tgi,gij->tgj", x, matrices)
