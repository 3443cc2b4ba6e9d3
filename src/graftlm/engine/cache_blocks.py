"""Which blocks of the KV cache a sequence holds, in each group of layers. Knows numbers and hashes; knows nothing of
tensors.

Layers that see the same stretch of a sequence form a group with block tables and a pool of its own. A sequence needs
blocks for all its tokens in a group that sees everything, and in a group with a sliding window for the window and the
chunk that is computed; what lies behind the window goes back to the pool. A sequence with more layers than the cache
has fills them several times, and has as many tables for each group.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftlm.engine.block_pool import BlockHash, BlockId, BlockPool

# Stands in a block table where a block has been given back.
DROPPED = BlockId(-1)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """window: how many tokens a token sees, itself included; None for all."""

    window: int | None
    pool: BlockPool


class BlockTable:
    """Blocks of one sequence in one group; entry i holds tokens [i * block_size, (i + 1) * block_size), and the first
    `num_dropped` entries are DROPPED."""

    def __init__(self) -> None:
        self._blocks: list[BlockId] = []
        self._packed: array[int] | None = None
        self.num_dropped = 0

    @property
    def blocks(self) -> Sequence[BlockId]:
        return self._blocks

    @property
    def packed(self) -> array[int]:
        """The blocks as they are now, in 64 bits each; nobody writes to it."""
        # A decode asks in every step, and the blocks change once in block_size steps.
        if self._packed is None:
            self._packed = array("q", self._blocks)
        return self._packed

    def extend(self, blocks: Iterable[BlockId]) -> None:
        """Add blocks behind the last."""
        self._blocks.extend(blocks)
        self._packed = None

    def drop(self, stop: int) -> list[BlockId]:
        """Give up the blocks before `stop`, which stay as DROPPED; those that were still there."""
        dropped = self._blocks[self.num_dropped : stop]
        self._blocks[self.num_dropped : stop] = [DROPPED] * (stop - self.num_dropped)
        self.num_dropped = max(stop, self.num_dropped)
        self._packed = None
        return dropped

    def clear(self) -> None:
        """Hold nothing."""
        self._blocks.clear()
        self._packed = None
        self.num_dropped = 0


class CacheBlocks:
    """Gives blocks to sequences and takes them back.

    Args:
        chunk_tokens: most tokens of one sequence computed at once.
    """

    def __init__(self, groups: Sequence[CacheGroup], *, block_size: int, chunk_tokens: int) -> None:
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self._groups = tuple(groups)

    @property
    def num_free(self) -> int:
        """Free blocks in all groups together."""
        return sum(group.pool.num_free for group in self._groups)

    @property
    def num_blocks(self) -> int:
        """Free and held blocks of all groups together."""
        return sum(group.pool.num_blocks for group in self._groups)

    def empty_tables(self, cache_factor: int = 1) -> list[BlockTable]:
        """Tables of a sequence that holds nothing: one for each group, and all of them again up to `cache_factor`."""
        return [BlockTable() for _ in range(cache_factor) for _ in self._groups]

    def fits(self, tables: Sequence[BlockTable], *, num_computed: int, num_tokens: int) -> bool:
        """Whether there are blocks for the next chunk of a sequence.

        Args:
            num_computed: tokens in the cache already. num_tokens: all its tokens.
        """
        num_missing = [0] * len(self._groups)
        for index, table in enumerate(tables):
            group = self._group_of(index)
            num_missing[index % len(self._groups)] += self._num_missing(group, table, num_computed, num_tokens)
        return all(count <= group.pool.num_free for count, group in zip(num_missing, self._groups, strict=True))

    def covers(self, tables: Sequence[BlockTable], *, num_computed: int, num_tokens: int) -> bool:
        """Whether a sequence has the blocks of its next chunk already."""
        for index, table in enumerate(tables):
            if self._num_missing(self._group_of(index), table, num_computed, num_tokens):
                return False
        return True

    def extend(self, tables: Sequence[BlockTable], *, num_computed: int, num_tokens: int) -> None:
        """Give a sequence the blocks of its next chunk.

        Raises:
            ValueError: they are not there; the caller checks `fits` first.
        """
        for index, table in enumerate(tables):
            group = self._group_of(index)
            table.extend(group.pool.allocate(self._num_missing(group, table, num_computed, num_tokens)))

    def share_prefix(self, tables: Sequence[BlockTable], hashes: Sequence[BlockHash]) -> int:
        """Give a sequence that holds nothing the blocks of its longest prefix that is in the cache.

        A group with a sliding window needs the blocks that the next token sees; the others need all.

        Args:
            hashes: of the blocks that may be used, from the first.

        Returns: the length of the prefix in blocks.
        """
        found: list[list[BlockId | None]] = [[] for _ in tables]
        # What sees everything first: where its blocks end, the others need not be looked for.
        by_reach = sorted(range(len(tables)), key=lambda index: self._group_of(index).window is not None)
        for index in by_reach:
            group = self._group_of(index)
            for block_hash in hashes:
                block = group.pool.find(self._hash_in(index, block_hash))
                if block is None and group.window is None:
                    break
                found[index].append(block)
            hashes = hashes[: len(found[index])]
        length = self._longest_prefix(found, len(hashes))
        for index, (table, blocks) in enumerate(zip(tables, found, strict=True)):
            group = self._group_of(index)
            table.drop(self._num_behind(group, length * self.block_size))
            shared = [block for block in blocks[table.num_dropped : length] if block is not None]
            for block in shared:
                group.pool.share(block)
            table.extend(shared)
        return length

    def record(self, tables: Sequence[BlockTable], hashes: Sequence[BlockHash], *, start: int, stop: int) -> None:
        """Note what blocks [start, stop) of a sequence contain now. hashes: from its first block on."""
        for index, table in enumerate(tables):
            group = self._group_of(index)
            for number in range(max(start, table.num_dropped), stop):
                group.pool.record(table.blocks[number], self._hash_in(index, hashes[number]))

    def num_known(self, tables: Sequence[BlockTable], hashes: Sequence[BlockHash], *, start: int) -> int:
        """How many blocks of a sequence that holds all of them, from block `start` on, are noted with their content."""
        count = 0
        for number in range(start, len(hashes)):
            for index, table in enumerate(tables):
                if number >= len(table.blocks):
                    return count
                known = self._group_of(index).pool.find(self._hash_in(index, hashes[number]))
                if known != table.blocks[number]:
                    return count
            count += 1
        return count

    def forget(self) -> None:
        """Nothing that blocks contain is known any more."""
        for group in self._groups:
            group.pool.forget()

    def drop_behind(self, tables: Sequence[BlockTable], *, num_computed: int) -> None:
        """Take back what no token from `num_computed` on sees."""
        for index, table in enumerate(tables):
            group = self._group_of(index)
            behind = self._num_behind(group, num_computed)
            if behind > table.num_dropped:
                group.pool.free(table.drop(behind))

    def release(self, tables: Sequence[BlockTable]) -> None:
        """Take back everything; the tables are empty then."""
        for index, table in enumerate(tables):
            group = self._group_of(index)
            # From the end: the beginning of a prompt is what others are most likely to share.
            group.pool.free(reversed(table.blocks[table.num_dropped :]))
            table.clear()

    def _longest_prefix(self, found: Sequence[Sequence[BlockId | None]], limit: int) -> int:
        """The most blocks, at most `limit`, that are found for every table as far back as the next token sees."""
        in_a_row = [_lengths_of_runs(blocks) for blocks in found]
        for length in range(limit, 0, -1):
            num_computed = length * self.block_size
            if all(
                runs[length - 1] >= length - self._num_behind(self._group_of(index), num_computed)
                for index, runs in enumerate(in_a_row)
            ):
                return length
        return 0

    def _group_of(self, table: int) -> CacheGroup:
        return self._groups[table % len(self._groups)]

    def _hash_in(self, table: int, block_hash: BlockHash) -> BlockHash:
        """What the content of a block is known by in one of a sequence's tables. In a group's second table and those
        that follow it are other layers' keys and values, of the same tokens."""
        turn = table // len(self._groups)
        return block_hash if turn == 0 else BlockHash(block_hash + turn.to_bytes(2))

    def _num_behind(self, group: CacheGroup, num_computed: int) -> int:
        """Blocks that no token from `num_computed` on sees."""
        return 0 if group.window is None else max(num_computed + 1 - group.window, 0) // self.block_size

    def _num_missing(self, group: CacheGroup, table: BlockTable, num_computed: int, num_tokens: int) -> int:
        stop = num_tokens
        if group.window is not None:
            # As much from the beginning as the window and a chunk ever take: what is admitted can go on to its end.
            stop = min(num_tokens, max(num_computed, group.window) + self.chunk_tokens)
        return max(-(-stop // self.block_size) - len(table.blocks), 0)


def _lengths_of_runs(blocks: Sequence[BlockId | None]) -> list[int]:
    """For each entry, how many up to and including it are there without a gap."""
    runs: list[int] = []
    for block in blocks:
        runs.append(0 if block is None else (runs[-1] if runs else 0) + 1)
    return runs


def blocks_for_window(window: int, *, block_size: int, chunk_tokens: int) -> int:
    """Most blocks a sequence of any length holds at once in a group with a sliding window."""
    return -(-(window + chunk_tokens) // block_size) + 1
