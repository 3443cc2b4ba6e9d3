"""Which blocks of the KV cache are free, which are shared, and what the full ones hold. Knows numbers and hashes; knows
nothing of tensors or requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NewType

BlockId = NewType("BlockId", int)
# Stands for all tokens up to the end of a block, and whoever computed them.
BlockHash = NewType("BlockHash", bytes)


class BlockPool:
    """A fixed number of blocks. A free block whose content is known by its hash keeps it, and can be shared, until no
    other is free; of these the longest free goes first. Of the others the last freed does: a block's memory comes from
    the system when it is first written, which costs more than filling it, so those that never were are left alone.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # The next to be given out is the last of the unknown and the first of the known ones.
        self._unknown = [BlockId(index) for index in reversed(range(num_blocks))]
        self._known = OrderedDict[BlockId, None]()
        self._users: dict[BlockId, int] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, whatever content they keep."""
        return len(self._unknown) + len(self._known)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks, whose content is forgotten.

        Raises:
            ValueError: fewer are free; the caller checks `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def _take(self) -> BlockId:
        if self._unknown:
            return self._unknown.pop()
        block, _ = self._known.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block with this content, held or free."""
        return self._block_of.get(block_hash)

    def share(self, block: BlockId) -> None:
        """Hold a found block, beside whoever holds it already."""
        self._known.pop(block, None)
        self._users[block] = self._users.get(block, 0) + 1

    def record(self, block: BlockId, block_hash: BlockHash) -> None:
        """Note what a held block contains from now on. A second block with the same content stays unknown.

        Raises:
            ValueError: nobody holds the block.
        """
        if block not in self._users:
            raise ValueError(f"block {block} is not taken")
        if block_hash not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget(self) -> None:
        """Unlearn what blocks contain; who holds them stays as it is."""
        self._hash_of.clear()
        self._block_of.clear()
        self._unknown.extend(self._known)
        self._known.clear()

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Let go of blocks; those that nobody else holds are free, the first of them for the longest.

        Raises:
            ValueError: a block was not taken.
        """
        for block in blocks:
            if block not in self._users:
                raise ValueError(f"block {block} is not taken")
            self._users[block] -= 1
            if self._users[block] == 0:
                del self._users[block]
                if block in self._hash_of:
                    self._known[block] = None
                else:
                    self._unknown.append(block)
