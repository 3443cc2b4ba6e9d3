"""Which experts of a mixture a token goes to."""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits: Tensor, experts_per_token: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The most probable experts of each token, and how much each counts.

    Semantics: p = softmax(logits) over all experts, in float32; the `experts_per_token` largest, divided by their sum
        if `renormalise`.
    Args: logits: [T, number of experts].
    Returns: weights [T, experts_per_token] float32, and the experts' indices, as many, int64.
    Source: Mixtral, arXiv 2401.04088. Renormalised, it is also the softmax over the largest logits alone (GPT-OSS).
    """
    weights, experts = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), experts_per_token, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), experts
