"""Computing scheduled sequences on the layers that are in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graftlm.adapters import AdapterWeights
from graftlm.engine.batch_builder import build_batch, build_key_values
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.registry import using
from graftlm.layers.block import BlocksRunner, run_blocks
from graftlm.layers.kv_cache import KVCache
from graftlm.layers.recorded_blocks import RecordedBlocks
from graftlm.models.decoder import DecoderSpan


class SpanRunner:
    """A decoder, or a span of one, with the KV cache of its layers.

    Args:
        kernels: what it computes with.
    """

    def __init__(self, span: DecoderSpan, *, num_blocks: Sequence[int], block_size: int, kernels: Kernels) -> None:
        self._span = span
        self._kernels = kernels
        new_recorder = kernels.new_recorder
        self._run_blocks: BlocksRunner = run_blocks if new_recorder is None else RecordedBlocks(new_recorder())
        self._cache = KVCache(
            span.kv_shapes, num_blocks=num_blocks, block_size=block_size, dtype=span.dtype, device=span.device
        )

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[ScheduledSequence],
        adapters: Mapping[str, AdapterWeights],
        hidden: Tensor | None = None,
        depths: range | None = None,
    ) -> Tensor:
        """Compute the sequences' tokens.

        Args:
            sequences: all of them run through the same layers.
            adapters: of the sequences, by digest.
            hidden: what the span before gives, [T, E]; the first span needs none.
            depths: as in `RaggedBatch`.

        Returns: as `DecoderSpan`; rows are in the sequences' order.
        """
        span = self._span
        with using(self._kernels):
            batch = build_batch(sequences, adapters, device=span.device, depths=depths)
            if not span.was_passed(batch):
                self._clear_begun(sequences)
            key_values = build_key_values(sequences, self._cache, windows=span.windows, device=span.device)
            return span(batch, key_values, hidden, self._run_blocks)

    def _clear_begun(self, sequences: Sequence[ScheduledSequence]) -> None:
        num_groups = len(self._span.windows)
        for table in range(len(sequences[0].block_tables)):
            if begun := [block for sequence in sequences if (block := self._begun_block(sequence, table)) is not None]:
                self._cache.clear(table % num_groups, begun)

    def _begun_block(self, sequence: ScheduledSequence, table: int) -> int | None:
        """The block of a table that this step begins and does not fill. Its other slots are attended, masked, before
        they are written: NaN that an overflowing adapter left there would come through the mask (0 * NaN)."""
        index, filled = divmod(sequence.stop, self._cache.block_size)
        return sequence.block_tables[table][index] if filled and sequence.stop - filled >= sequence.start else None
