"""Attention of some rows over some keys and values, however these are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.kernels.reference.precision import widened


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionScores:
    """How scores are made of products q . k.

    scale: factor. softcap: c * tanh(score / c).
    slopes: [H], float32 or bfloat16; slope times the key's position, rounded to that dtype, times `slope_factor` is
        added (ALiBi). Behind a window positions count from the first block that is read.
    sinks: [H], one more score per head that takes part in the softmax and has no value.
    Sources: Gemma 2, arXiv 2408.00118 (soft cap); ALiBi, arXiv 2108.12409; GPT-OSS, arXiv 2508.10925 (sinks).
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    slope_factor: float = 1.0
    sinks: Tensor | None = None

    @property
    def is_eager(self) -> bool:
        """Whether torch's own attention cannot make them."""
        return self.softcap is not None or self.sinks is not None


def causal_visibility(query_len: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys the last `query_len` of `num_keys` positions see, [query_len, num_keys] bool; None when that is what a
    plain causal mask lets them see."""
    if num_keys == query_len and (window is None or num_keys <= window):
        return None
    query = torch.arange(num_keys - query_len, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & (query - key < window)


def attend_sequence(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores: AttentionScores
) -> Tensor:
    """Attention within one sequence.

    Args:
        query: [Q, H, D]; H a multiple of K. key, value: [N, K, D]. visible: [Q, N] bool, or None for plain causal.
    Returns: [Q, H, D].
    """
    rows, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    if visible is None and (scores.slopes is not None or scores.is_eager):
        visible = torch.ones(rows.shape[2], key.shape[2], dtype=torch.bool, device=rows.device).tril()
    mask = visible
    if mask is not None and scores.slopes is not None:
        mask = _alibi(mask, scores.slopes[:, None, None], scores.slope_factor, rows.dtype)
    if scores.is_eager and mask is not None:
        group = rows.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        sinks = None if scores.sinks is None else scores.sinks[:, None, None]
        attended = _attend_eagerly(rows, key, value, mask, scores, sinks)
    else:
        attended = functional.scaled_dot_product_attention(
            rows,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scale,
            enable_gqa=rows.shape[1] != key.shape[1],
        )
    return attended.squeeze(0).transpose(0, 1)


def attend_groups(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: AttentionScores) -> Tensor:
    """Attention of one position in each of G sequences. The heads that share a KV head stand as its query rows, so keys
    and values are never repeated.

    Args:
        query: [G, K, H / K, D]. key, value: [G, K, N, D]. visible: [G, N] bool.
    Returns: [G, K, H / K, D].
    """
    mask = visible[:, None, None, :]
    if scores.slopes is not None:
        mask = _alibi(mask, scores.slopes.view(query.shape[1], -1, 1), scores.slope_factor, query.dtype)
    if not scores.is_eager:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    sinks = None if scores.sinks is None else scores.sinks.view(query.shape[1], -1, 1)
    return _attend_eagerly(query, key, value, mask, scores, sinks)


def _alibi(visible: Tensor, slopes: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """The mask with the bias of each key's index added. Shifting all keys of a query alike changes nothing in a
    softmax, so the index may count from wherever the keys begin; only bfloat16's rounding sees the difference."""
    bias = slopes * torch.arange(visible.shape[-1], device=visible.device)
    return torch.where(visible, bias.to(dtype) * factor, -torch.inf)


def _attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: AttentionScores, sinks: Tensor | None
) -> Tensor:
    """For what torch's own kernel cannot do; casts where transformers' eager attention does.

    query: [B, H, Q, D]. key, value: [B, H, N, D]. mask: bool, or added. sinks: as far as [B, H, Q, 1] broadcasts.
    """
    weights = (query @ key.transpose(-1, -2)) * scores.scale
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
    if sinks is not None:
        weights = torch.cat([weights, sinks.to(weights.dtype).expand(*weights.shape[:-1], 1)], dim=-1)
    weights = weights.softmax(dim=-1, dtype=widened(weights).dtype).to(query.dtype)
    return weights[..., : key.shape[-2]] @ value
