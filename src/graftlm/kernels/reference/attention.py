"""Ragged attention over a paged KV cache.

Sequences with one new token (decodes) are attended together, in groups whose block counts lie within a factor of two
of each other; sequences with more are attended one by one. Both read K and V through the block table, from the first
block a sliding window reaches. The plan for a step is made once and shared by all layers with the same window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """G sequences with one new token each.

    rows: [G] their packed rows, or None when they are all rows in order.
    blocks: [G * N] block ids, short tables padded with their first block.
    visible: [G, N * block_size] bool.
    """

    rows: Tensor | None
    blocks: Tensor
    visible: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillSequence:
    """Rows [start, stop) of one sequence, which see `num_keys` keys from the beginning of the first of `blocks`.

    visible: [stop - start, num_keys] bool, or None when they see what a plain causal mask lets them see.
    """

    start: int
    stop: int
    num_keys: int
    blocks: Tensor
    visible: Tensor | None


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSequence, ...]


@dataclass(frozen=True, kw_only=True)
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


def plan_attention(
    query_lens: Sequence[int],
    total_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    window: int | None = None,
    device: torch.device,
) -> AttentionPlan:
    """Decide how one step's sequences are attended.

    Args:
        query_lens: new tokens of each sequence, in packed order.
        total_lens: tokens each sequence has in the cache after this step's keys are written.
        block_tables: block ids of each sequence; entry i holds tokens [i * block_size, (i + 1) * block_size). Entries
            that lie wholly behind the window are not read.
        window: a token sees this many tokens, itself included; None for all.
    """
    prefills: list[PrefillSequence] = []
    groups: dict[int, list[_Decode]] = {}
    start = 0
    for query_len, total_len, table in zip(query_lens, total_lens, block_tables, strict=True):
        oldest = 0 if window is None else max(total_len - query_len + 1 - window, 0)
        first_block = oldest // block_size
        blocks = table[first_block : -(-total_len // block_size)]
        offset = first_block * block_size
        if query_len == 1:
            decode = _Decode(row=start, oldest=oldest - offset, num_keys=total_len - offset, blocks=blocks)
            groups.setdefault(len(blocks).bit_length(), []).append(decode)
        else:
            prefills.append(_prefill(start, query_len, total_len - offset, blocks, window, device))
        start += query_len
    decodes = [_decode_group(members, start, block_size, device) for _, members in sorted(groups.items())]
    return AttentionPlan(decodes=tuple(decodes), prefills=tuple(prefills))


@dataclass(frozen=True, kw_only=True)
class _Decode:
    """Keys [oldest, num_keys) of the blocks are visible to packed row `row`."""

    row: int
    oldest: int
    num_keys: int
    blocks: Sequence[int]


def _prefill(
    start: int, query_len: int, num_keys: int, blocks: Sequence[int], window: int | None, device: torch.device
) -> PrefillSequence:
    visible = None
    if num_keys > query_len or (window is not None and num_keys > window):
        query = torch.arange(num_keys - query_len, num_keys, device=device)[:, None]
        key = torch.arange(num_keys, device=device)[None, :]
        visible = key <= query
        if window is not None:
            visible &= query - key < window
    return PrefillSequence(
        start=start,
        stop=start + query_len,
        num_keys=num_keys,
        blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        visible=visible,
    )


def _decode_group(members: list[_Decode], num_rows: int, block_size: int, device: torch.device) -> DecodeGroup:
    width = max(len(member.blocks) for member in members)
    # Padded with a block of its own: a masked value is multiplied by 0, and what others left might be NaN.
    padded = [[*member.blocks, *[member.blocks[0]] * (width - len(member.blocks))] for member in members]
    oldest = torch.tensor([member.oldest for member in members], device=device)[:, None]
    num_keys = torch.tensor([member.num_keys for member in members], device=device)[:, None]
    key = torch.arange(width * block_size, device=device)[None, :]
    return DecodeGroup(
        rows=None if len(members) == num_rows else torch.tensor([member.row for member in members], device=device),
        blocks=torch.tensor(padded, dtype=torch.int64, device=device).flatten(),
        visible=(key >= oldest) & (key < num_keys),
    )


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: AttentionScores
) -> Tensor:
    """Causal attention of each new token over its own sequence.

    Semantics: for token t of sequence s at position p: softmax(scores(q_t . K_s[0..p])) @ V_s[0..p], or from p - window
    + 1 on if the plan was made with a window.
    Args:
        query: [T, H, D]; H a multiple of K (grouped-query attention: query head h reads KV head h // (H / K)).
        key_cache, value_cache: [num_blocks, block_size, K, D], this step's tokens already written.
    Returns: [T, H, D].
    Source: PagedAttention, arXiv 2309.06180; GQA, arXiv 2305.13245.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decodes:
        attended = _attend_decodes(query, key_cache, value_cache, group, scores)
        if group.rows is None:
            out = attended
        else:
            out.index_copy_(0, group.rows, attended)
    for sequence in plan.prefills:
        out[sequence.start : sequence.stop] = _attend_prefill(query, key_cache, value_cache, sequence, scores)
    return out


def _attend_decodes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scores: AttentionScores
) -> Tensor:
    num_kv_heads, head_dim = key_cache.shape[2:]
    rows = query if group.rows is None else query.index_select(0, group.rows)
    count, num_heads, _ = rows.shape
    shape = (count, -1, num_kv_heads, head_dim)
    key = key_cache.index_select(0, group.blocks).view(shape).transpose(1, 2)
    value = value_cache.index_select(0, group.blocks).view(shape).transpose(1, 2)
    # One position per sequence: the heads that share a KV head become its query rows, so K and V are never repeated.
    grouped = rows.reshape(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = group.visible[:, None, None, :]
    if scores.slopes is not None:
        mask = _alibi(mask, scores.slopes.view(num_kv_heads, -1, 1), scores.slope_factor, rows.dtype)
    if scores.softcap is None and scores.sinks is None:
        attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scores.scale)
    else:
        sinks = None if scores.sinks is None else scores.sinks.view(num_kv_heads, -1, 1)
        attended = _attend_eagerly(grouped, key, value, mask, scores, sinks)
    return attended.reshape(count, num_heads, head_dim)


def _attend_prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, sequence: PrefillSequence, scores: AttentionScores
) -> Tensor:
    rows = query[sequence.start : sequence.stop].transpose(0, 1).unsqueeze(0)
    key = key_cache.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.num_keys].transpose(0, 1).unsqueeze(0)
    value = value_cache.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.num_keys].transpose(0, 1).unsqueeze(0)
    visible = sequence.visible
    if scores.slopes is None and scores.softcap is None and scores.sinks is None:
        attended = functional.scaled_dot_product_attention(
            rows,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None,
            scale=scores.scale,
            enable_gqa=rows.shape[1] != key.shape[1],
        )
        return attended.squeeze(0).transpose(0, 1)
    if visible is None:
        visible = torch.ones(rows.shape[2], key.shape[2], dtype=torch.bool, device=rows.device).tril()
    mask = visible
    if scores.slopes is not None:
        mask = _alibi(visible, scores.slopes[:, None, None], scores.slope_factor, rows.dtype)
    if scores.softcap is None and scores.sinks is None:
        attended = functional.scaled_dot_product_attention(
            rows,
            key,
            value,
            attn_mask=mask,
            scale=scores.scale,
            enable_gqa=rows.shape[1] != key.shape[1],
        )
    else:
        group = rows.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        sinks = None if scores.sinks is None else scores.sinks[:, None, None]
        attended = _attend_eagerly(rows, key, value, mask, scores, sinks)
    return attended.squeeze(0).transpose(0, 1)


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
    weights = weights.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[-2]] @ value
