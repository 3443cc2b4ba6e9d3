"""Functions of single elements."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# torch computes whole groups of vectors in one way and what is left over in another, with other rounding. This many
# elements are whole groups for every dtype and instruction set.
_GROUP = 64
# Fewer than torch shares out among threads.
_PIECE = 1 << 14


def elementwise(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """`ops.elementwise`."""
    shape: torch.Size = torch.broadcast_shapes(*(operand.shape for operand in operands))  # type: ignore[no-untyped-call]
    pieces = [torch.split(_in_groups(operand.expand(shape)), _PIECE) for operand in operands]
    out = torch.cat([function(*parts) for parts in zip(*pieces, strict=True)])
    return out[: math.prod(shape)].view(shape)


def _in_groups(x: Tensor) -> Tensor:
    """The elements in one row, with zeros behind them."""
    padded = x.new_zeros(-(-x.numel() // _GROUP) * _GROUP)
    padded[: x.numel()] = x.reshape(-1)
    return padded
