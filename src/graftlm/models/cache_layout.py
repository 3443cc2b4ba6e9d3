"""What a model keeps of each token in the KV cache, from its spec alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graftlm.layers.kv_cache import KVShape
from graftlm.models.spec import AttentionSpec, ModelSpec


def cache_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """How far back each cache group sees, in the order of its first layer; None for all the way."""
    return tuple(dict.fromkeys(attention.window for attention in _cached(spec)))


def farthest_group(windows: Sequence[int | None]) -> int:
    """The first cache group of those that see farthest back."""
    reach = [math.inf if window is None else window for window in windows]
    return reach.index(max(reach))


def cache_shapes(spec: ModelSpec) -> tuple[KVShape, ...]:
    """What each layer with keys and values of its own caches. Layers that see equally far back share a group."""
    windows = cache_windows(spec)
    return tuple(
        KVShape(
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            group=windows.index(attention.window),
        )
        for attention in _cached(spec)
    )


def _cached(spec: ModelSpec) -> list[AttentionSpec]:
    """Of the layers that have keys and values of their own."""
    return [layer.attention for layer in spec.layers if layer.attention.kv_layer is None]
