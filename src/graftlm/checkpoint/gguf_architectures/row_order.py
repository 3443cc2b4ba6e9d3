"""Row orders that llama.cpp's converter changes, undone. Each acts on whole rows, so it is exact on quantised blocks.

Source: the modify_tensors methods of llama.cpp's conversion scripts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.checkpoint.gguf_architectures.translation import RowOrder


def rotary_halves(num_heads: int) -> RowOrder:
    """From ggml's interleaved pairs of rotary dimensions to transformers' two halves, within each of `num_heads`."""

    def reorder(rows: Tensor) -> Tensor:
        pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    return reorder


def grouped_qkv(num_heads: int, num_kv_heads: int) -> RowOrder:
    """From [all Q | all K | all V] to one run per key-value head: its queries, its key, its value."""
    queries = num_heads // num_kv_heads

    def reorder(rows: Tensor) -> Tensor:
        heads = rows.view(num_heads + 2 * num_kv_heads, -1, *rows.shape[1:])
        q, k, v = heads.split_with_sizes([num_heads, num_kv_heads, num_kv_heads])
        q = q.reshape(num_kv_heads, queries, *heads.shape[1:])
        return torch.cat([q, k.unsqueeze(1), v.unsqueeze(1)], dim=1).reshape(rows.shape)

    return reorder
