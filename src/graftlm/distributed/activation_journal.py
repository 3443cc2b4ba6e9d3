"""What a stage gave for the tokens that are in the cache: from this the stage after it can compute its keys and values
again. Knows slots and rows; knows nothing of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.engine.batch_builder import slots_of
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.layers.kv_cache import lazy_zeros

# A slot to which nothing was written.
_EMPTY = -1
_POSITIONS = torch.int32


class ActivationJournal:
    """Boundary activations, one row for each slot of a group of cache blocks.

    A row is addressed by the slot that its token has in the KV cache, so it lives exactly as long as the token's keys
    and values do: block tables are the journal's index, the block pool is its eviction, blocks that requests share are
    kept once, and nothing travels for it. Petals (arXiv 2312.08361) keeps the same activations at the client.

    Args:
        table: which of a sequence's block tables says where. num_blocks: of that group.
        width: of what a span gives for each token. Memory becomes resident only where rows are written.
    """

    def __init__(self, *, table: int, num_blocks: int, block_size: int, width: int, dtype: torch.dtype) -> None:
        self._table = table
        self._block_size = block_size
        num_slots = num_blocks * block_size
        self._rows = lazy_zeros((num_slots, width), dtype, torch.device("cpu"))
        self._positions = torch.full((num_slots,), _EMPTY, dtype=_POSITIONS)

    def write(self, sequences: Sequence[ScheduledSequence], output: Tensor) -> None:
        """Keep what was computed for sequences. output: [T, width], in their order."""
        slots = self._slots(sequences)
        self._rows.index_copy_(0, slots, output)
        self._positions.index_copy_(0, slots, _positions(sequences))

    def holds(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether every token's slot was last written to by a token of the same position."""
        slots = self._slots(sequences)
        return bool((slots >= 0).all()) and torch.equal(self._positions[slots], _positions(sequences))

    def read(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        """What was given for sequences, [T, width]."""
        return self._rows.index_select(0, self._slots(sequences))

    def _slots(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        return torch.tensor(slots_of(sequences, self._table, self._block_size), dtype=torch.int64)


def journal_bytes_per_token(width: int, dtype: torch.dtype) -> int:
    """Memory one token takes in one journal."""
    return width * dtype.itemsize + _POSITIONS.itemsize


def _positions(sequences: Sequence[ScheduledSequence]) -> Tensor:
    return torch.tensor(
        [position for sequence in sequences for position in range(sequence.start, sequence.stop)], dtype=_POSITIONS
    )
