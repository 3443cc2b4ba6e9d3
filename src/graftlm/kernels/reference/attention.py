"""Ragged attention over a paged KV cache.

Sequences with one new token (decodes) are attended together, in groups whose block counts lie within a factor of two
of each other; sequences with more are attended one by one. Both read K and V through the block table. The plan for a
step is made once and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """G sequences with one new token each. rows: [G] their packed rows, or None when they are all rows in order.
    blocks: [G * N] block ids, short tables padded with their first block. visible: [G, 1, 1, N * block_size] bool."""

    rows: Tensor | None
    blocks: Tensor
    visible: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefillSequence:
    """Rows [start, stop) of one sequence whose cache then holds `length` tokens. visible: [stop - start, length] bool,
    or None when the sequence starts here (a plain causal mask)."""

    start: int
    stop: int
    length: int
    blocks: Tensor
    visible: Tensor | None


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSequence, ...]


def plan_attention(
    query_lens: Sequence[int],
    total_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    device: torch.device,
) -> AttentionPlan:
    """Decide how one step's sequences are attended.

    Args:
        query_lens: new tokens of each sequence, in packed order.
        total_lens: tokens each sequence has in the cache after this step's keys are written.
        block_tables: block ids of each sequence; entry i holds tokens [i * block_size, (i + 1) * block_size).
    """
    prefills: list[PrefillSequence] = []
    groups: dict[int, list[tuple[int, int, Sequence[int]]]] = {}
    start = 0
    for query_len, total_len, table in zip(query_lens, total_lens, block_tables, strict=True):
        blocks = table[: -(-total_len // block_size)]
        if query_len == 1:
            groups.setdefault(len(blocks).bit_length(), []).append((start, total_len, blocks))
        else:
            prefills.append(_prefill(start, query_len, total_len, blocks, device))
        start += query_len
    decodes = [_decode_group(members, start, block_size, device) for _, members in sorted(groups.items())]
    return AttentionPlan(decodes=tuple(decodes), prefills=tuple(prefills))


def _prefill(
    start: int, query_len: int, total_len: int, blocks: Sequence[int], device: torch.device
) -> PrefillSequence:
    visible = None
    if total_len > query_len:
        last_visible = torch.arange(total_len - query_len, total_len, device=device)
        visible = torch.arange(total_len, device=device)[None, :] <= last_visible[:, None]
    return PrefillSequence(
        start=start,
        stop=start + query_len,
        length=total_len,
        blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        visible=visible,
    )


def _decode_group(
    members: list[tuple[int, int, Sequence[int]]], num_rows: int, block_size: int, device: torch.device
) -> DecodeGroup:
    width = max(len(blocks) for _, _, blocks in members)
    # Padded with a block of its own: a masked value is multiplied by 0, and what others left might be NaN.
    padded = [[*blocks, *[blocks[0]] * (width - len(blocks))] for _, _, blocks in members]
    lengths = torch.tensor([length for _, length, _ in members], device=device)
    visible = torch.arange(width * block_size, device=device)[None, :] < lengths[:, None]
    return DecodeGroup(
        rows=None if len(members) == num_rows else torch.tensor([row for row, _, _ in members], device=device),
        blocks=torch.tensor(padded, dtype=torch.int64, device=device).flatten(),
        visible=visible[:, None, None, :],
    )


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, *, scale: float
) -> Tensor:
    """Causal attention of each new token over its own sequence.

    Semantics: for token t of sequence s at position p: softmax(scale * q_t . K_s[0..p]) @ V_s[0..p].
    Args:
        query: [T, H, D]; H a multiple of K (grouped-query attention: query head h reads KV head h // (H / K)).
        key_cache, value_cache: [num_blocks, block_size, K, D], this step's tokens already written.
    Returns: [T, H, D].
    Source: PagedAttention, arXiv 2309.06180; GQA, arXiv 2305.13245.
    """
    out = torch.empty_like(query)
    for group in plan.decodes:
        attended = _attend_decodes(query, key_cache, value_cache, group, scale)
        if group.rows is None:
            out = attended
        else:
            out.index_copy_(0, group.rows, attended)
    for sequence in plan.prefills:
        out[sequence.start : sequence.stop] = _attend_prefill(query, key_cache, value_cache, sequence, scale)
    return out


def _attend_decodes(query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    num_kv_heads, head_dim = key_cache.shape[2:]
    rows = query if group.rows is None else query.index_select(0, group.rows)
    count, num_heads, _ = rows.shape
    # One position per sequence: the heads that share a KV head become its query rows, so K and V are never repeated.
    grouped = rows.view(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
    shape = (count, -1, num_kv_heads, head_dim)
    key = key_cache.index_select(0, group.blocks).view(shape).transpose(1, 2)
    value = value_cache.index_select(0, group.blocks).view(shape).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=group.visible, scale=scale)
    return attended.reshape(count, num_heads, head_dim)


def _attend_prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, sequence: PrefillSequence, scale: float
) -> Tensor:
    rows = query[sequence.start : sequence.stop].transpose(0, 1).unsqueeze(0)
    key = key_cache.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.length].transpose(0, 1).unsqueeze(0)
    value = value_cache.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.length].transpose(0, 1).unsqueeze(0)
    attended = functional.scaled_dot_product_attention(
        rows,
        key,
        value,
        attn_mask=sequence.visible,
        is_causal=sequence.visible is None,
        scale=scale,
        enable_gqa=rows.shape[1] != key.shape[1],
    )
    return attended.squeeze(0).transpose(0, 1)
