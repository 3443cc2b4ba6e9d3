"""Attention over whole sequences packed one after the other, without a cache: differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.reference.attention_scores import AttentionScores, attend_sequence, causal_visibility


@dataclass(frozen=True, kw_only=True)
class PackedAttentionPlan:
    """lengths: rows of each sequence, in order. visible: as `causal_visibility` says, for each."""

    lengths: tuple[int, ...]
    visible: tuple[Tensor | None, ...]


def plan_packed_attention(lengths: Sequence[int], *, window: int | None, device: torch.device) -> PackedAttentionPlan:
    """How sequences of these lengths are attended. window: a token sees this many, itself included; None for all."""
    return PackedAttentionPlan(
        lengths=tuple(lengths),
        visible=tuple(causal_visibility(length, length, window, device) for length in lengths),
    )


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: PackedAttentionPlan, scores: AttentionScores
) -> Tensor:
    """Causal attention of each token over its own sequence.

    Args: query: [T, H, D]; H a multiple of K. key, value: [T, K, D]. T is the sum of the plan's lengths.
    Returns: [T, H, D].
    """
    attended = []
    start = 0
    for length, visible in zip(plan.lengths, plan.visible, strict=True):
        rows = slice(start, start + length)
        attended.append(attend_sequence(query[rows], key[rows], value[rows], visible, scores))
        start += length
    return torch.cat(attended)
