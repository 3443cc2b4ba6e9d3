"""Keys and values of a step: where they go, and attention over what is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.kv_cache import KVCache
from graftlm.layers.rotary import Angles


class KeyValues(Protocol):
    """layer: which of the decoder's sets of keys and values. group: of the layers that see equally far back."""

    def write(self, layer: int, group: int, key: Tensor, value: Tensor) -> None:
        """This step's keys and values, [T, K, D] each."""
        ...

    def write_rotated(
        self, layer: int, group: int, query: Tensor, key: Tensor, value: Tensor, angles: Angles
    ) -> Tensor:
        """`write` of rotated keys. query: [T, H, D], not to be used any more -> the same, rotated."""
        ...

    def attend(self, layer: int, group: int, query: Tensor, scores: ops.AttentionScores) -> Tensor:
        """Causal attention of each row over its own sequence. query: [T, H, D] -> [T, H, D]."""
        ...


@dataclass(frozen=True, kw_only=True)
class CacheGroupBatch:
    """A step as the layers of one cache group see it.

    slots: [T] int64, where each token's key and value go in the paged cache.
    attention: how the sequences are attended, planned once for these layers.
    """

    slots: Tensor
    attention: ops.AttentionPlan


@dataclass(frozen=True, kw_only=True)
class PagedKeyValues:
    """In the paged cache, beside those of earlier steps. groups: in the decoder's order."""

    cache: KVCache
    groups: tuple[CacheGroupBatch, ...]

    def write(self, layer: int, group: int, key: Tensor, value: Tensor) -> None:
        ops.write_kv(key, value, self.cache.key[layer], self.cache.value[layer], self.groups[group].slots)

    def write_rotated(
        self, layer: int, group: int, query: Tensor, key: Tensor, value: Tensor, angles: Angles
    ) -> Tensor:
        caches = self.cache.key[layer], self.cache.value[layer]
        return ops.rotate_and_write(query, key, value, *angles, *caches, self.groups[group].slots)

    def attend(self, layer: int, group: int, query: Tensor, scores: ops.AttentionScores) -> Tensor:
        key, value = self.cache.key[layer], self.cache.value[layer]
        return ops.paged_attention(query, key, value, self.groups[group].attention, scores)


@dataclass(frozen=True, kw_only=True)
class DepthKeyValues:
    """Those of one depth of a stack of other layers than the decoder's.

    The cache has layers for the span's own number of them. A stack that has more there fills them over again, from
    other blocks: where all layers are of one group, its sequences have a block table for each time.

    layer: of the cache. table: which of the sequences' block tables.
    """

    key_values: KeyValues
    layer: int
    table: int

    def write(self, layer: int, group: int, key: Tensor, value: Tensor) -> None:
        self.key_values.write(self.layer, self.table, key, value)

    def write_rotated(
        self, layer: int, group: int, query: Tensor, key: Tensor, value: Tensor, angles: Angles
    ) -> Tensor:
        return self.key_values.write_rotated(self.layer, self.table, query, key, value, angles)

    def attend(self, layer: int, group: int, query: Tensor, scores: ops.AttentionScores) -> Tensor:
        return self.key_values.attend(self.layer, self.table, query, scores)


class PackedKeyValues:
    """Of whole sequences that begin and end in this step: nothing is cached, and gradients flow.

    Args:
        lengths: of the sequences, in packed order. windows: of the decoder's groups.
        shared: the sets of keys and values that several layers read. All others are let go once they are read: with
            them goes what autograd keeps of how they were made.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        windows: Sequence[int | None],
        device: torch.device,
        *,
        shared: Collection[int],
    ) -> None:
        self._shared = shared
        self._plans = [ops.plan_packed_attention(lengths, window=window, device=device) for window in windows]
        self._key_values: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, group: int, key: Tensor, value: Tensor) -> None:
        self._key_values[layer] = key, value

    def write_rotated(
        self, layer: int, group: int, query: Tensor, key: Tensor, value: Tensor, angles: Angles
    ) -> Tensor:
        self.write(layer, group, ops.apply_rotary(key, *angles), value)
        return ops.apply_rotary(query, *angles)

    def attend(self, layer: int, group: int, query: Tensor, scores: ops.AttentionScores) -> Tensor:
        key, value = self._key_values[layer] if layer in self._shared else self._key_values.pop(layer)
        return ops.packed_attention(query, key, value, self._plans[group], scores)
