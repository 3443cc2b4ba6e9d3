"""From a scheduled step to the decoder's ragged batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from graftlm.engine.scheduler import ScheduledSequence
from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.patch import LinearPatch, Segment, Slot


def build_batch(
    sequences: Sequence[ScheduledSequence],
    patches: Mapping[str, Mapping[Slot, LinearPatch]],
    *,
    block_size: int,
    device: torch.device,
) -> RaggedBatch:
    """Pack the sequences one after the other.

    Args:
        sequences: those of one adapter next to each other.
        patches: adapter digest -> what it does to each layer.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for sequence in sequences:
        span = range(sequence.start, sequence.stop)
        token_ids.extend(sequence.token_ids)
        positions.extend(span)
        slots.extend(
            sequence.block_table[position // block_size] * block_size + position % block_size for position in span
        )
        logit_rows.extend(range(len(token_ids) - sequence.num_logits, len(token_ids)))
    return RaggedBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        attention=ops.plan_attention(
            [len(sequence.token_ids) for sequence in sequences],
            [sequence.stop for sequence in sequences],
            [sequence.block_table for sequence in sequences],
            block_size=block_size,
            device=device,
        ),
        segments=_segments(sequences, patches, [len(sequence.token_ids) for sequence in sequences]),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        logit_segments=_segments(sequences, patches, [sequence.num_logits for sequence in sequences]),
    )


def _segments(
    sequences: Sequence[ScheduledSequence],
    patches: Mapping[str, Mapping[Slot, LinearPatch]],
    row_counts: Sequence[int],
) -> tuple[Segment, ...]:
    """One segment per adapter that has rows; `row_counts` says how many each sequence contributes."""
    segments = []
    start = 0
    rows = zip(sequences, row_counts, strict=True)
    for digest, members in groupby(rows, key=lambda member: member[0].adapter_digest):
        stop = start + sum(count for _, count in members)
        if digest is not None and stop > start:
            segments.append(Segment(start=start, stop=stop, patches=patches[digest]))
        start = stop
    return tuple(segments)
