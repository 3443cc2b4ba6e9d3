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

from graftlm.kernels.reference.attention_scores import (
    AttentionScores,
    attend_groups,
    attend_sequence,
    causal_visibility,
)


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


def plan_attention(
    query_lens: Sequence[int],
    total_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    window: int | None = None,
    device: torch.device,
) -> AttentionPlan:
    """`ops.plan_attention`."""
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
    return PrefillSequence(
        start=start,
        stop=start + query_len,
        num_keys=num_keys,
        blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        visible=causal_visibility(query_len, num_keys, window, device),
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
    """`ops.paged_attention`."""
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
    attended = attend_groups(grouped, key, value, group.visible, scores)
    return attended.reshape(count, num_heads, head_dim)


def _attend_prefill(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, sequence: PrefillSequence, scores: AttentionScores
) -> Tensor:
    key = key_cache.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.num_keys]
    value = value_cache.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.num_keys]
    return attend_sequence(query[sequence.start : sequence.stop], key, value, sequence.visible, scores)
