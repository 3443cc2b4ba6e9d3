"""Which worker has probably which beginnings of prompts in its cache. Knows hashes; knows nothing of tokens or memory.

It is a guess: workers do not say what they evict. A wrong one costs time and nothing else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Chained hashes of the blocks that went to each worker, the longest unused forgotten first.

    Args:
        max_blocks: that are remembered of each worker.
    """

    def __init__(self, max_blocks: int = 4096) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def num_cached(self, worker_id: str, prefix: Sequence[int]) -> int:
        """How many blocks of a prompt a worker has, from the first one on."""
        known = self._blocks.get(worker_id)
        if not known:
            return 0
        for index, block in enumerate(prefix):
            if block not in known:
                return index
        return len(prefix)

    def record(self, worker_id: str, prefix: Sequence[int]) -> None:
        """A prompt went to a worker."""
        known = self._blocks.setdefault(worker_id, OrderedDict())
        # The first blocks of a chain are used last: a chain without its beginning is worth nothing.
        for block in reversed(prefix):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """A worker's cache is empty. Unknown workers are fine."""
        self._blocks.pop(worker_id, None)


def prefix_of(token_ids: Sequence[int], *, scope: str, block_size: int) -> tuple[int, ...]:
    """Hashes of a prompt's full blocks, each over all tokens up to its end.

    Args:
        scope: what else the cached keys depend on: the adapter's digest, the tenant's salt.
    """
    chain = hashlib.blake2b(scope.encode(), digest_size=8)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        chain.update(array("q", token_ids[start : start + block_size]).tobytes())
        hashes.append(int.from_bytes(chain.digest(), "little"))
    return tuple(hashes)
