"""Logits of a step's sequences that were computed in several goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def in_order(parts: Sequence[Tensor], members: Sequence[Sequence[int]], row_counts: Sequence[int]) -> Tensor:
    """The rows of all sequences in the sequences' order.

    Args:
        parts: [n, V] each, the rows of some of the sequences. V may differ: what a part has no logits for is -inf.
        members: which sequences each part is of, ascending. row_counts: of all sequences.

    Returns: [N, V], V the largest.
    """
    vocab_size = max(part.shape[1] for part in parts)
    rows: dict[int, Tensor] = {}
    for part, indices in zip(parts, members, strict=True):
        padded = pad(part, (0, vocab_size - part.shape[1]), value=-math.inf)
        rows |= zip(indices, torch.split(padded, [row_counts[index] for index in indices]), strict=True)
    return torch.cat([rows[index] for index in range(len(row_counts))])
