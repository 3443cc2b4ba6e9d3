"""The only decoder. It is assembled from layers by `build.py`; it knows no family and no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.layers.attention import Attention
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.embedding import Embedding
from graftlm.layers.kv_cache import KVCache, KVShape
from graftlm.layers.linear import Linear
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
        attended = self.attention(self.pre_attention_norm(hidden), batch, angles, key_cache, value_cache)
        hidden = hidden + attended
        return hidden + self.mlp(self.pre_mlp_norm(hidden), batch)


class Decoder:
    """Token ids to logits, over ragged batches. `sites` says where adapters can attach."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        rotary: RotaryEmbedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
        kv_shapes: Sequence[KVShape],
        sites: SiteMap,
        vocab_size: int,
        max_position_embeddings: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._embedding = embedding
        self._rotary = rotary
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self.kv_shapes = tuple(kv_shapes)
        self.sites = sites
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.dtype = dtype
        self.device = device

    def __call__(self, batch: RaggedBatch, cache: KVCache) -> Tensor:
        """Logits of the rows that want them, [N, V] float32; keys and values of all rows go into the cache."""
        hidden = self._embedding(batch.token_ids)
        angles = self._rotary.angles(batch.positions, hidden.dtype)
        for layer, key_cache, value_cache in zip(self._layers, cache.key, cache.value, strict=True):
            hidden = layer(hidden, batch, angles, key_cache, value_cache)
        wanted = self._final_norm(hidden.index_select(0, batch.logit_rows))
        return self._head(wanted, batch.logit_segments).float()
