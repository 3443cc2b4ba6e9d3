"""Which blocks of the KV cache are free. Knows numbers; knows nothing of tensors or requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NewType

BlockId = NewType("BlockId", int)


class BlockPool:
    """A fixed number of blocks, each free or taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(BlockId(index) for index in range(num_blocks))
        self._taken: set[BlockId] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks.

        Raises:
            ValueError: fewer are free; the caller checks `num_free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block was not taken.
        """
        for block in blocks:
            if block not in self._taken:
                raise ValueError(f"block {block} is not taken")
            self._taken.remove(block)
            self._free.append(block)
