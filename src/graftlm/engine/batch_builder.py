"""From a scheduled step to the decoder's ragged batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    depths: range | None = None,
) -> RaggedBatch:
    """Pack the sequences one after the other.

    Args:
        sequences: those of one adapter next to each other; all of them run through the same layers.
        adapters: by digest.
        depths: as in `RaggedBatch`.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for sequence in sequences:
        token_ids.extend(sequence.token_ids)
        positions.extend(range(sequence.start, sequence.stop))
        logit_rows.extend(range(len(token_ids) - sequence.num_logits, len(token_ids)))
    num_tokens = [len(sequence.token_ids) for sequence in sequences]
    num_logits = [sequence.num_logits for sequence in sequences]
    segments = _segments(sequences, adapters, num_tokens)
    return RaggedBatch(
        token_ids=_int64(token_ids, device),
        positions=_int64(positions, device),
        prompt_lens=_int64(np.repeat([sequence.prompt_len for sequence in sequences], num_tokens), device),
        sequence_lens=_int64(np.repeat([sequence.sequence_len for sequence in sequences], num_tokens), device),
        segments=segments,
        logit_rows=_int64(logit_rows, device),
        # While all decode, the rows are the same, and what is found out of the adapters' is found out once.
        logit_segments=segments if num_logits == num_tokens else _segments(sequences, adapters, num_logits),
        layers=_layers_of(sequences[0], adapters),
        depths=depths,
    )


def by_layers(
    sequences: Sequence[ScheduledSequence], adapters: Mapping[str, AdapterWeights]
) -> dict[tuple[int, ...] | None, list[int]]:
    """Which of the sequences run through which layers, as in `RaggedBatch`."""
    groups: dict[tuple[int, ...] | None, list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(_layers_of(sequence, adapters), []).append(index)
    return groups


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


def _layers_of(sequence: ScheduledSequence, adapters: Mapping[str, AdapterWeights]) -> tuple[int, ...] | None:
    """The layers that a sequence runs through, as in `RaggedBatch`."""
    if sequence.adapter_digest is None:
        return None
    stack = adapters[sequence.adapter_digest].patch.stack
    return None if stack is None else stack.layers


def _group(
    sequences: Sequence[ScheduledSequence], index: int, window: int | None, block_size: int, device: torch.device
) -> CacheGroupBatch:
    return CacheGroupBatch(
        slots=_int64(slots_of(sequences, index, block_size), device),
        attention=ops.plan_attention(
            [len(sequence.token_ids) for sequence in sequences],
            [sequence.stop for sequence in sequences],
            [sequence.block_tables[index] for sequence in sequences],
            block_size=block_size,
            window=window,
            device=device,
        ),
    )


def _int64(values: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> Tensor:
    # By way of numpy, which reads a short list in a tenth of the time.
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)


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
