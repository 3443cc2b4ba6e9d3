"""Attention over whole sequences packed one after the other, without a cache: differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.reference.attention_scores import AttentionScores, attend_sequence, causal_visibility
from graftlm.kernels.reference.precision import widened

# Rows of the longest sequence up to which torch's backward pass is faster on a CPU in float32 than in bfloat16: five
# times at 16 rows, as fast at 256 (torch 2.13).
WIDE_ROWS = 256


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
    dtype = query.dtype
    if query.requires_grad and query.device.type == "cpu" and max(plan.lengths) <= WIDE_ROWS:
        query, key, value = widened(query), widened(key), widened(value)
    # Split once: the gradient of a slice would be as long as all sequences together, for each of them.
    parts = (torch.split(tensor, list(plan.lengths)) for tensor in (query, key, value))
    attended = [
        attend_sequence(queries, keys, values, visible, scores)
        for queries, keys, values, visible in zip(*parts, plan.visible, strict=True)
    ]
    return torch.cat(attended).to(dtype)
