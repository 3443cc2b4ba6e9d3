"""From a scheduled step to the decoder's ragged batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graftlm.adapters import AdapterWeights
from graftlm.engine.scheduler import ScheduledSequence
from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.key_values import CacheGroupBatch, PagedKeyValues
from graftlm.layers.kv_cache import KVCache
from graftlm.layers.patch import ModelPatch
from graftlm.layers.segments import Segment, Segments


def build_batch(
    sequences: Sequence[ScheduledSequence],
    adapters: Mapping[str, AdapterWeights],
    *,
    device: torch.device,
) -> RaggedBatch:
    """Pack the sequences one after the other.

    Args:
        sequences: those of one adapter next to each other; all of them run through the same layers.
        adapters: by digest.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for sequence in sequences:
        token_ids.extend(sequence.token_ids)
        positions.extend(range(sequence.start, sequence.stop))
        logit_rows.extend(range(len(token_ids) - sequence.num_logits, len(token_ids)))
    return RaggedBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        prompt_lens=_per_token(sequences, [sequence.prompt_len for sequence in sequences], device),
        sequence_lens=_per_token(sequences, [sequence.sequence_len for sequence in sequences], device),
        segments=_segments(sequences, adapters, [len(sequence.token_ids) for sequence in sequences]),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        logit_segments=_segments(sequences, adapters, [sequence.num_logits for sequence in sequences]),
        layers=layers_of(sequences[0], adapters),
    )


def layers_of(sequence: ScheduledSequence, adapters: Mapping[str, AdapterWeights]) -> tuple[int, ...] | None:
    """The layers that a sequence runs through, as in `RaggedBatch`."""
    if sequence.adapter_digest is None:
        return None
    stack = adapters[sequence.adapter_digest].patch.stack
    return None if stack is None else stack.layers


def build_key_values(
    sequences: Sequence[ScheduledSequence], cache: KVCache, *, windows: Sequence[int | None], device: torch.device
) -> PagedKeyValues:
    """Where the sequences' keys and values are. windows: of the decoder's cache groups."""
    groups = [
        _group(sequences, index, windows[index % len(windows)], cache.block_size, device)
        for index in range(len(sequences[0].block_tables))
    ]
    return PagedKeyValues(cache=cache, groups=tuple(groups))


def slots_of(sequences: Sequence[ScheduledSequence], index: int, block_size: int) -> list[int]:
    """The slot of each token in the cache, by the sequences' tables of that index."""
    return [
        sequence.block_tables[index][position // block_size] * block_size + position % block_size
        for sequence in sequences
        for position in range(sequence.start, sequence.stop)
    ]


def _group(
    sequences: Sequence[ScheduledSequence], index: int, window: int | None, block_size: int, device: torch.device
) -> CacheGroupBatch:
    return CacheGroupBatch(
        slots=torch.tensor(slots_of(sequences, index, block_size), dtype=torch.int64, device=device),
        attention=ops.plan_attention(
            [len(sequence.token_ids) for sequence in sequences],
            [sequence.stop for sequence in sequences],
            [sequence.block_tables[index] for sequence in sequences],
            block_size=block_size,
            window=window,
            device=device,
        ),
    )


def _per_token(sequences: Sequence[ScheduledSequence], values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Each sequence's value for each of its tokens, [T] int64."""
    counts = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    return torch.tensor(values, dtype=torch.int64).repeat_interleave(counts).to(device)


def _segments(
    sequences: Sequence[ScheduledSequence], adapters: Mapping[str, AdapterWeights], row_counts: Sequence[int]
) -> Segments:
    """Adjacent rows of one patch as one segment. Each sequence contributes its last `row_counts` rows."""
    segments: list[Segment] = []
    start = 0
    for sequence, count in zip(sequences, row_counts, strict=True):
        if sequence.adapter_digest is not None:
            adapter = adapters[sequence.adapter_digest]
            dormant = min(max(sequence.active_from - (sequence.stop - count), 0), count)
            _extend(segments, start, start + dormant, adapter.dormant_patch)
            _extend(segments, start + dormant, start + count, adapter.patch)
        start += count
    return Segments(segments)


def _extend(segments: list[Segment], start: int, stop: int, patch: ModelPatch) -> None:
    if start == stop:
        return
    if segments and segments[-1].stop == start and segments[-1].patch is patch:
        start = segments.pop().start
    segments.append(Segment(start=start, stop=stop, patch=patch))
