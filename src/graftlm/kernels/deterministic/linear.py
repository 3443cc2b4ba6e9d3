"""Products with a matrix."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.kernels.deterministic.product import TILE_ROWS, batched_product, product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`ops.linear`."""
    out = product(x, weight.t())
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def grouped_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """`ops.grouped_matmul`."""
    num_groups = x.shape[1]
    own = matrices.expand(num_groups, -1, -1).contiguous()
    tiles = [
        batched_product(
            functional.pad(tile, (0, 0, 0, 0, 0, TILE_ROWS - len(tile))).transpose(0, 1).contiguous(), own
        ).transpose(0, 1)[: len(tile)]
        for tile in torch.split(x, TILE_ROWS)
    ]
    return torch.cat(tiles)
