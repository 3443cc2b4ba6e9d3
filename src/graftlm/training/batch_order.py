"""Which documents make up which batch: a function of seed and batch number, so that a run can go on anywhere."""

from __future__ import annotations

import math
from functools import lru_cache

import torch


class BatchOrder:
    """Batches never reach over the end of an epoch; its last may be smaller."""

    def __init__(self, num_documents: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        self._num_documents = num_documents
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self.batches_per_epoch = math.ceil(num_documents / batch_size)
        self._order_of = lru_cache(maxsize=1)(self._order)

    def batch(self, number: int) -> list[int]:
        """Indices of the documents in batch `number`, counted from 0 over all epochs."""
        epoch, index = divmod(number, self.batches_per_epoch)
        return self._order_of(epoch)[index * self._batch_size : (index + 1) * self._batch_size]

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._num_documents))
        return permutation(self._num_documents, self._seed, epoch)


def permutation(count: int, seed: int, stream: int) -> list[int]:
    """A random order of `count` things. stream: another order from the same seed."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + stream) % (1 << 63))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
