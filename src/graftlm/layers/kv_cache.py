"""Memory for keys and values, in blocks. Which block belongs to whom is the engine's business."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one layer caches per token. group: layers of one group share their block tables."""

    num_kv_heads: int
    head_dim: int
    group: int = 0


class KVCache:
    """Paged keys and values of every layer: `key[layer]`, `value[layer]` are [num_blocks, block_size, K, D], with the
    number of blocks of the layer's group.

    Memory is reserved at once and, on the CPU, becomes resident only where tokens are written.
    """

    def __init__(
        self,
        layers: Sequence[KVShape],
        *,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._layers = tuple(layers)
        shapes = [(num_blocks[layer.group], block_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self.key: list[Tensor] = [lazy_zeros(shape, dtype, device) for shape in shapes]
        self.value: list[Tensor] = [lazy_zeros(shape, dtype, device) for shape in shapes]

    def clear(self, group: int, blocks: Sequence[int]) -> None:
        """Zero whole blocks in every layer of a group."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.key[0].device)
        for layer, key, value in zip(self._layers, self.key, self.value, strict=True):
            if layer.group == group:
                key.index_fill_(0, ids, 0)
                value.index_fill_(0, ids, 0)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on the CPU, take memory only where they are written to.

    There through numpy, whose zeros are pages the system has not handed out yet; torch would write to them all. Zeros,
    not garbage: a masked position is multiplied by 0, and 0 * NaN would poison the row.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def kv_bytes_per_token(layers: Sequence[KVShape], dtype: torch.dtype) -> int:
    """Bytes one token takes in all layers together."""
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers) * dtype.itemsize
