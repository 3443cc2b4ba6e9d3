"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.linear import Linear
from graftlm.layers.rotary import RotaryEmbedding


class Attention:
    """Grouped-query attention with rotary positions; q, k and v come from one fused projection, in that order."""

    def __init__(self, *, qkv: Linear, output: Linear, num_heads: int, num_kv_heads: int, head_dim: int, scale: float):
        self.qkv = qkv
        self.output = output
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = scale

    def __call__(
        self, x: Tensor, batch: RaggedBatch, angles: tuple[Tensor, Tensor], key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """x: [T, E] -> [T, E]; writes this step's keys and values into the cache."""
        heads = self.qkv(x, batch.segments).view(x.shape[0], -1, self._head_dim)
        turned = self._num_heads + self._num_kv_heads
        query_key = RotaryEmbedding.rotate(heads[:, :turned], angles)
        query, key = query_key[:, : self._num_heads], query_key[:, self._num_heads :]
        ops.write_kv(key, heads[:, turned:], key_cache, value_cache, batch.slots)
        attended = ops.paged_attention(query, key_cache, value_cache, batch.attention, scale=self._scale)
        return self.output(attended.reshape(x.shape[0], -1), batch.segments)
