"""What all layers share while one batch is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.kv_cache import KVCache
from graftlm.layers.rotary import Angles, RotaryEmbedding


@dataclass(frozen=True, kw_only=True)
class DecoderStep:
    """The batch, the cache its keys and values go to, and the angles of its tokens under each rotary embedding."""

    batch: RaggedBatch
    cache: KVCache
    angles: Mapping[RotaryEmbedding, Angles]
