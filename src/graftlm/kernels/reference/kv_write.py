"""Writing keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store each token's key and value in its slot; every other slot is untouched.

    Args:
        key, value: [T, K, D].
        key_cache, value_cache: [num_blocks, block_size, K, D].
        slots: [T] int64; slot = block * block_size + offset, all different.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
