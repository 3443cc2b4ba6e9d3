"""Self-attention."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.linear import Linear
from graftlm.layers.norm import Norm
from graftlm.layers.rotary import RotaryEmbedding
from graftlm.layers.segments import Segments
from graftlm.layers.step import DecoderStep

# How the columns of the fused projection are shared out. "concatenated": all query heads, all key heads, all value
# heads. "grouped": for each KV head its query heads, then its key, then its value. "keys_as_values": all query heads,
# all key heads, which are the value heads too.
HeadOrder = Literal["concatenated", "grouped", "keys_as_values"]


class SelfAttention(Protocol):
    """How the tokens of a sequence see each other."""

    def __call__(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x: [T, E] -> [T, E]."""
        ...


class Attention:
    """Grouped-query attention; q, k and v come from one fused projection.

    query_norm, key_norm: over slices of as many columns as the norm is wide: one head, or the whole projection.
    value_norm: over each head, without weights.
    cache_layer, cache_group: where its keys and values are, as in `KeyValues`.
    """

    def __init__(
        self,
        *,
        qkv: Linear,
        output: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_order: HeadOrder,
        scores: ops.AttentionScores,
        rotary: RotaryEmbedding | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        value_norm: Norm | None,
        cache_layer: int,
        cache_group: int,
    ) -> None:
        self._qkv = qkv
        self._output = output
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._head_order = head_order
        self._scores = scores
        self._rotary = rotary
        self._query_norm = query_norm
        self._key_norm = key_norm
        self._value_norm = value_norm
        self._cache_layer = cache_layer
        self._cache_group = cache_group

    def __call__(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x: [T, E] -> [T, E]."""
        segments = step.batch.segments
        query, key, value = self._split(self._qkv(x, segments))
        query = _normed(query, self._query_norm, segments)
        key = _normed(key, self._key_norm, segments)
        value = _normed(value, self._value_norm, segments)
        query = self._write(query, key, value, step)
        attended = step.key_values.attend(self._cache_layer, self._cache_group, query, self._scores)
        return self._output(attended.reshape(x.shape[0], -1), segments)

    def _write(self, query: Tensor, key: Tensor, value: Tensor, step: DecoderStep) -> Tensor:
        """Rotate queries and keys, and write keys and values. Returns the queries."""
        layer, group = self._cache_layer, self._cache_group
        angles = None if self._rotary is None else step.angles[self._rotary]
        if angles is not None and not step.batch.segments.with_prefix:
            return step.key_values.write_rotated(layer, group, query, key, value, angles)
        if angles is not None:
            query, key = ops.apply_rotary(query, *angles), ops.apply_rotary(key, *angles)
        self._put_prefixes(key, value, step.batch)
        step.key_values.write(layer, group, key, value)
        return query

    def _put_prefixes(self, key: Tensor, value: Tensor, batch: RaggedBatch) -> None:
        """Where an adapter has keys and values of its own for the first positions, they take the place of what was
        computed there."""
        for segment in batch.segments.with_prefix:
            prefix = segment.patch.prefix
            if prefix is not None:
                keys, values = prefix.keys[self._cache_layer], prefix.values[self._cache_layer]
                positions = batch.positions[segment.start : segment.stop]
                rows = (positions < len(keys)).nonzero()[:, 0]
                key[segment.start : segment.stop][rows] = keys[positions[rows]]
                value[segment.start : segment.stop][rows] = values[positions[rows]]

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H, D], [T, K, D], [T, K, D]."""
        if self._head_order == "concatenated":
            heads = qkv.view(qkv.shape[0], -1, self._head_dim)
            query, key, value = heads.split_with_sizes((self._num_heads, self._num_kv_heads, self._num_kv_heads), 1)
            return query, key, value
        if self._head_order == "keys_as_values":
            heads = qkv.view(qkv.shape[0], -1, self._head_dim)
            keys = heads[:, self._num_heads :]
            return heads[:, : self._num_heads], keys, keys
        groups = qkv.view(qkv.shape[0], self._num_kv_heads, -1, self._head_dim)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]


class BorrowingAttention:
    """Attention with queries alone, over the keys and values of an earlier layer.

    cache_layer, cache_group: where that layer's are.
    """

    def __init__(
        self,
        *,
        query: Linear,
        output: Linear,
        num_heads: int,
        scores: ops.AttentionScores,
        rotary: RotaryEmbedding | None,
        query_norm: Norm | None,
        cache_layer: int,
        cache_group: int,
    ) -> None:
        self._query = query
        self._output = output
        self._num_heads = num_heads
        self._scores = scores
        self._rotary = rotary
        self._query_norm = query_norm
        self._cache_layer = cache_layer
        self._cache_group = cache_group

    def __call__(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x: [T, E] -> [T, E]."""
        segments = step.batch.segments
        query = self._query(x, segments).view(x.shape[0], self._num_heads, -1)
        query = _normed(query, self._query_norm, segments)
        if self._rotary is not None:
            query = ops.apply_rotary(query, *step.angles[self._rotary])
        attended = step.key_values.attend(self._cache_layer, self._cache_group, query, self._scores)
        return self._output(attended.reshape(x.shape[0], -1), segments)


def _normed(heads: Tensor, norm: Norm | None, segments: Segments) -> Tensor:
    if norm is None or norm.weight is None:
        return heads if norm is None else norm(heads, segments)
    return norm(heads.reshape(heads.shape[0], -1, len(norm.weight)), segments).view(heads.shape)
