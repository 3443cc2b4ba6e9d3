"""Writing keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from graftlm.kernels.reference.rotary import apply_rotary


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """`ops.write_kv`."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`ops.rotate_and_write`."""
    write_kv(apply_rotary(key, cos, sin), value, key_cache, value_cache, slots)
    return apply_rotary(query, cos, sin)
