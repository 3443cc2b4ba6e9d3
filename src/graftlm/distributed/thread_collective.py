"""Ranks that are threads of one process."""

from __future__ import annotations

import functools
import operator
import threading

from torch import Tensor

from graftlm.layers.collective import CollectiveFailed


class ThreadGroup:
    """Where `size` threads meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor | None] = [None] * size

    def join(self, rank: int) -> ThreadCollective:
        return ThreadCollective(self, rank)


class ThreadCollective:
    """`Collective` over memory that the ranks share."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self._group = group

    @property
    def size(self) -> int:
        return self._group.size

    def all_reduce(self, partial: Tensor) -> Tensor:
        return functools.reduce(operator.add, self.all_gather(partial))

    def all_gather(self, own: Tensor) -> list[Tensor]:
        group = self._group
        group.slots[self.rank] = own.clone()
        self._meet()
        gathered = [tensor for tensor in group.slots if tensor is not None]
        # Nobody puts the next one there before all have read.
        self._meet()
        return gathered

    def close(self) -> None:
        self._group.barrier.abort()

    def _meet(self) -> None:
        try:
            self._group.barrier.wait()
        except threading.BrokenBarrierError as broken:
            raise CollectiveFailed("another rank is gone") from broken
