"""How many blocks the KV cache has, and how long a sequence it can hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftlm.config import EngineConfig
from graftlm.engine.cache_blocks import blocks_for_window
from graftlm.engine.memory import available_bytes
from graftlm.errors import ConfigurationError
from graftlm.layers.kv_cache import KVShape, kv_bytes_per_token
from graftlm.models.cache_layout import farthest_group

logger = logging.getLogger(__name__)

# Without a budget of its own the cache takes no more than this, and no more than half of the free memory.
DEFAULT_KV_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """num_blocks: of each cache group. sequence_blocks: the most of them that one sequence holds at once.
    max_model_len: tokens of the longest sequence."""

    num_blocks: tuple[int, ...]
    sequence_blocks: tuple[int, ...]
    block_size: int
    max_model_len: int

    def longest_sequence(self, cache_factor: int) -> int:
        """Tokens of the longest sequence whose tokens take that many times the base's memory."""
        shares = [count // cache_factor for count in self.num_blocks]
        short = [share for share, whole in zip(shares, self.sequence_blocks, strict=True) if share < whole]
        return min(self.max_model_len, min(short, default=self.max_model_len) * self.block_size)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """block_bytes: of one block in all layers of the group. sequence_blocks: most blocks one sequence needs."""

    block_bytes: int
    sequence_blocks: int


def plan_cache(
    config: EngineConfig,
    shapes: Sequence[KVShape],
    windows: Sequence[int | None],
    *,
    context_len: int,
    dtype: torch.dtype,
    device: torch.device,
    journal_bytes: int = 0,
) -> CachePlan:
    """Share the cache's byte budget out among the groups.

    All groups get the same number of blocks, but none more than `max_num_seqs` sequences can use: a group with a short
    window soon has enough, and the rest goes to those that see everything.

    Args:
        shapes: of the cache's layers. windows: of its groups. context_len: the model's.
        journal_bytes: of what else is kept of each token, for as long as it is in the group that sees farthest.

    Raises:
        ConfigurationError: the budget holds no block, or not one sequence of the length asked for.
    """
    wanted_len = config.max_model_len or context_len
    if wanted_len > context_len:
        raise ConfigurationError(
            "max_model_len is larger than the model's context", got=wanted_len, allowed=f"at most {context_len}"
        )
    token_bytes = [
        kv_bytes_per_token([shape for shape in shapes if shape.group == index], dtype) for index in range(len(windows))
    ]
    token_bytes[farthest_group(windows)] += journal_bytes
    groups = [
        _Group(
            block_bytes=config.block_size * token_bytes[index],
            sequence_blocks=_sequence_blocks(config, wanted_len, window),
        )
        for index, window in enumerate(windows)
    ]
    num_blocks = _share_out(config, groups, device)
    return CachePlan(
        num_blocks=num_blocks,
        sequence_blocks=tuple(group.sequence_blocks for group in groups),
        block_size=config.block_size,
        max_model_len=_max_model_len(config, groups, num_blocks, wanted_len),
    )


def _sequence_blocks(config: EngineConfig, wanted_len: int, window: int | None) -> int:
    blocks = -(-wanted_len // config.block_size)
    if window is None:
        return blocks
    return min(blocks, blocks_for_window(window, block_size=config.block_size, chunk_tokens=config.chunk_tokens))


def _share_out(config: EngineConfig, groups: Sequence[_Group], device: torch.device) -> tuple[int, ...]:
    budget = config.kv_cache_bytes
    if budget is None:
        budget = min(DEFAULT_KV_CACHE_BYTES, available_bytes(device) // 2)
    if budget < (least := sum(group.block_bytes for group in groups)):
        raise ConfigurationError(
            "kv_cache_bytes does not hold a single block", got=budget, allowed=f"at least {least} bytes"
        )
    useful = [config.max_num_seqs * group.sequence_blocks for group in groups]
    left, unfilled, shares = budget, list(range(len(groups))), dict[int, int]()
    # The group with the least use first: what it leaves is shared by the others.
    for index in sorted(unfilled, key=lambda index: useful[index]):
        level = left // sum(groups[other].block_bytes for other in unfilled)
        shares[index] = min(level, useful[index])
        left -= shares[index] * groups[index].block_bytes
        unfilled.remove(index)
    return tuple(shares[index] for index in range(len(groups)))


def _max_model_len(config: EngineConfig, groups: Sequence[_Group], num_blocks: Sequence[int], wanted_len: int) -> int:
    short = [count for group, count in zip(groups, num_blocks, strict=True) if count < group.sequence_blocks]
    if not short:
        return wanted_len
    capacity = min(short) * config.block_size
    if config.max_model_len is not None:
        raise ConfigurationError(
            "the KV cache cannot hold one sequence of max_model_len",
            got=f"{wanted_len} tokens",
            allowed=f"at most {capacity} tokens in this cache",
            do="raise kv_cache_bytes or lower max_model_len",
        )
    logger.warning("context limited to %d of %d tokens by the KV cache's memory", capacity, wanted_len)
    return capacity
