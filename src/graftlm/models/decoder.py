"""The only decoder. It is assembled from layers by `build.py`; it knows no family and no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.layers.attention import Attention
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.embedding import Embedding
from graftlm.layers.head import OutputHead
from graftlm.layers.kv_cache import KVCache, KVShape
from graftlm.layers.mlp import GatedMLP
from graftlm.layers.norm import RMSNorm
from graftlm.layers.rotary import RotaryEmbedding
from graftlm.models.site import SiteMap


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """Pre-norm block with sequential residuals."""

    pre_attention_norm: RMSNorm
    attention: Attention
    pre_mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(
        self, hidden: Tensor, batch: RaggedBatch, angles: tuple[Tensor, Tensor], key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        normed = self.pre_attention_norm(hidden, batch.segments)
        hidden = hidden + self.attention(normed, batch, angles, key_cache, value_cache)
        return hidden + self.mlp(self.pre_mlp_norm(hidden, batch.segments), batch)


class Decoder:
    """Token ids to logits, over ragged batches. `sites` says where adapters can attach."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        rotary: RotaryEmbedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: OutputHead,
        kv_shapes: Sequence[KVShape],
        sites: SiteMap,
        vocab_size: int,
        max_position_embeddings: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.embedding = embedding
        self._rotary = rotary
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.head = head
        self.kv_shapes = tuple(kv_shapes)
        self.sites = sites
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.dtype = dtype
        self.device = device

    def __call__(self, batch: RaggedBatch, cache: KVCache) -> Tensor:
        """Logits of the rows that want them, [N, V] float32, V the largest vocabulary among them. Keys and values of
        all rows go into the cache."""
        hidden = self.embedding(batch.token_ids, batch.segments)
        angles = self._rotary.angles(batch.positions, hidden.dtype)
        for layer, key_cache, value_cache in zip(self.layers, cache.key, cache.value, strict=True):
            hidden = layer(hidden, batch, angles, key_cache, value_cache)
        wanted = self.final_norm(hidden.index_select(0, batch.logit_rows), batch.logit_segments)
        return self.head(wanted, batch.logit_segments)
