"""Running a scheduled step on the model. Holds the decoder, the KV cache and the adapters that running requests use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.adapters import Adapter
from graftlm.engine.batch_builder import build_batch, build_key_values
from graftlm.engine.block_pool import BlockId
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.layers.kv_cache import KVCache
from graftlm.models.decoder import Decoder


class LocalExecutor:
    """Executes in this process."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._adapters: dict[str, Adapter] = {}
        self._users: Counter[str] = Counter()

    def hold_adapter(self, adapter: Adapter) -> None:
        """Keep an adapter for one more user. Equal digests are equal weights, under whatever name."""
        self._adapters.setdefault(adapter.digest, adapter)
        self._users[adapter.digest] += 1

    def release_adapter(self, adapter: Adapter) -> None:
        """One user fewer; the last one takes the weights along."""
        self._users[adapter.digest] -= 1
        if self._users[adapter.digest] == 0:
            del self._users[adapter.digest], self._adapters[adapter.digest]

    @torch.inference_mode()
    def execute(self, sequences: Sequence[ScheduledSequence]) -> Tensor:
        """Compute the sequences' tokens; logits of the rows that want them, [N, V] float32, in the given order."""
        for group in range(len(self._decoder.windows)):
            if begun := [block for sequence in sequences if (block := self._begun_block(sequence, group)) is not None]:
                self._cache.clear(group, begun)
        decoder = self._decoder
        batch = build_batch(sequences, self._adapters, device=decoder.device)
        key_values = build_key_values(sequences, self._cache, windows=decoder.windows, device=decoder.device)
        return decoder(batch, key_values)

    def _begun_block(self, sequence: ScheduledSequence, group: int) -> BlockId | None:
        """The block that this step begins and does not fill. Its other slots are attended, masked, before they are
        written: NaN that an overflowing adapter left there would come through the mask (0 * NaN)."""
        index, filled = divmod(sequence.stop, self._cache.block_size)
        return sequence.block_tables[group][index] if filled and sequence.stop - filled >= sequence.start else None
