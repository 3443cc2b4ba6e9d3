"""Ragged attention over a paged KV cache, in tiles of queries and keys.

Each query tile has a fixed number of rows, those that are not there being zero; a key tile begins at a multiple of its
length in the sequence. A row's maximum and sums go over key tiles in the order of their positions. Keys that a row does
not see add zeros, so a row is the same whether it is computed alone or in the middle of a prompt, and so are tiles
behind its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.kernels.deterministic.elementwise import elementwise
from graftlm.kernels.deterministic.product import batched_product
from graftlm.kernels.reference.attention_scores import AttentionScores
from graftlm.kernels.reference.precision import widened

# Rows of a query tile: few, since a decode fills one of them.
_QUERY_ROWS = 4
# Keys of a tile, at least one block.
_KEYS = 128


@dataclass(frozen=True, kw_only=True)
class QueryTile:
    """Packed rows [start, stop), at most `_QUERY_ROWS`, of positions from `position` on, which see keys in
    [first, last) of their sequence's key tiles."""

    start: int
    stop: int
    position: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class TiledSequence:
    """The query tiles of a sequence and its keys.

    blocks: [N * blocks of a tile] block ids of N key tiles; a block that is not there or not seen is another's.
    positions: [N * keys of a tile] of the keys. num_keys: tokens in the cache.
    """

    queries: tuple[QueryTile, ...]
    blocks: Tensor
    positions: Tensor
    num_keys: int


@dataclass(frozen=True, kw_only=True)
class TiledAttentionPlan:
    """tile_keys: of a key tile. window: as in `ops.plan_attention`."""

    sequences: tuple[TiledSequence, ...]
    tile_keys: int
    window: int | None

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scores: AttentionScores) -> Tensor:
        """`ops.paged_attention`."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for sequence in self.sequences:
            keys, values = (self._gather(cache, sequence.blocks) for cache in (key_cache, value_cache))
            for tile in sequence.queries:
                out[tile.start : tile.stop] = self._attend(query, keys, values, sequence, tile, scores)
        return out

    def _gather(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """[N, K, keys of a tile, D] float32, contiguous."""
        tiles = cache.index_select(0, blocks).view(-1, self.tile_keys, *cache.shape[2:])
        return widened(tiles.transpose(1, 2)).contiguous()

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sequence: TiledSequence,
        tile: QueryTile,
        scores: AttentionScores,
    ) -> Tensor:
        """[rows of the tile, H, D]."""
        rows = widened(query[tile.start : tile.stop])
        num_rows, num_heads, head_dim = rows.shape
        num_kv_heads = keys.shape[1]
        keys, values = keys[tile.first : tile.last], values[tile.first : tile.last]
        num_tiles = len(keys)
        padded = functional.pad(rows, (0, 0, 0, 0, 0, _QUERY_ROWS - num_rows))
        grouped = padded.view(_QUERY_ROWS, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        queries = grouped.expand(num_tiles, -1, -1, -1).flatten(0, 1).contiguous()

        # [tiles, K, rows, heads of a KV head, keys of a tile]
        shape = (num_tiles, num_kv_heads, _QUERY_ROWS, num_heads // num_kv_heads, self.tile_keys)
        weights = batched_product(queries, keys.flatten(0, 1).mT).view(shape) * scores.scale
        if scores.softcap is not None:
            weights = elementwise(torch.tanh, weights / scores.softcap) * scores.softcap
        places = slice(tile.first * self.tile_keys, tile.last * self.tile_keys)
        positions = sequence.positions[places].view(num_tiles, 1, 1, 1, self.tile_keys)
        if scores.slopes is not None:
            bias = scores.slopes.view(num_kv_heads, 1, -1, 1) * positions
            weights = weights + bias.to(query.dtype) * scores.slope_factor
        own = torch.arange(tile.position, tile.position + _QUERY_ROWS, device=query.device).view(-1, 1, 1)
        visible = (positions <= own) & (positions < sequence.num_keys)
        if self.window is not None:
            visible &= own - positions < self.window
        weights = weights.masked_fill(~visible, -torch.inf)

        largest = weights.amax(dim=(0, 4))
        sinks = None if scores.sinks is None else widened(scores.sinks).view(num_kv_heads, 1, -1)
        if sinks is not None:
            largest = torch.maximum(largest, sinks)
        # Rows that only fill the tile up see nothing.
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = elementwise(torch.exp, weights - largest.unsqueeze(-1))
        total = _in_order(weights.sum(dim=-1))
        if sinks is not None:
            total = total + elementwise(torch.exp, sinks - largest)
        products = batched_product(weights.flatten(2, 3).flatten(0, 1), values.flatten(0, 1))
        attended = _in_order(products.view(*shape[:-1], head_dim)) / total.unsqueeze(-1)
        return attended.transpose(0, 1).reshape(_QUERY_ROWS, num_heads, head_dim)[:num_rows].to(query.dtype)


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, one after the other: zeros in front or behind change nothing."""
    return parts.cumsum(dim=0)[-1]


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: TiledAttentionPlan, scores: AttentionScores
) -> Tensor:
    """`ops.paged_attention`."""
    return plan.attend(query, key_cache, value_cache, scores)


def plan_attention(
    query_lens: Sequence[int],
    total_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    window: int | None = None,
    device: torch.device,
) -> TiledAttentionPlan:
    """`ops.plan_attention`."""
    tile_blocks = max(1, _KEYS // block_size)
    tile_keys = tile_blocks * block_size
    sequences = []
    start = 0
    for query_len, total_len, table in zip(query_lens, total_lens, block_tables, strict=True):
        first_position = total_len - query_len
        oldest = 0 if window is None else max(first_position + 1 - window, 0)
        first_tile, last_tile = oldest // tile_keys, -(-total_len // tile_keys)
        seen = range(oldest // block_size, -(-total_len // block_size))
        wanted = range(first_tile * tile_blocks, last_tile * tile_blocks)
        blocks = [table[index] if index in seen else table[seen.stop - 1] for index in wanted]
        queries = []
        for offset in range(0, query_len, _QUERY_ROWS):
            position = first_position + offset
            stop = min(offset + _QUERY_ROWS, query_len)
            from_key = 0 if window is None else max(position + 1 - window, 0)
            queries.append(
                QueryTile(
                    start=start + offset,
                    stop=start + stop,
                    position=position,
                    first=from_key // tile_keys - first_tile,
                    last=-(-(first_position + stop) // tile_keys) - first_tile,
                )
            )
        sequences.append(
            TiledSequence(
                queries=tuple(queries),
                blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
                positions=torch.arange(first_tile * tile_keys, last_tile * tile_keys, device=device),
                num_keys=total_len,
            )
        )
        start += query_len
    return TiledAttentionPlan(sequences=tuple(sequences), tile_keys=tile_keys, window=window)
