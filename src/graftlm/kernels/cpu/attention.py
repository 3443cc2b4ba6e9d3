"""Paged attention in C++."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from graftlm.kernels.cpu.call_log import empty
from graftlm.kernels.cpu.calls import DTYPE_CODES, address, takes
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.cpu.plan_table import PlanTable
from graftlm.kernels.kernel_set import AttentionPlan, Kernels
from graftlm.kernels.reference.attention_scores import AttentionScores

# csrc's `Scores`.
_SCORES = struct.Struct("fffiPP")


@dataclass(frozen=True, kw_only=True)
class PagedPlan:
    """What `plan_attention` was asked, as the library wants it.

    memory: csrc's `Sequence`s, [S, 5], of which the last column points into block tables.
    """

    query_lens: Sequence[int]
    total_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    block_size: int
    window: int | None
    device: torch.device
    memory: PlanTable
    rest: Kernels

    @property
    def layout(self) -> Hashable:
        """As `RecordablePlan`."""
        return len(self.query_lens), self.block_size, self.window

    def held(self) -> PagedPlan:
        """As `RecordablePlan`."""
        return replace(self, memory=self.memory.copy(capacity=len(self.query_lens)))

    @cached_property
    def of_rest(self) -> AttentionPlan:
        """For what the library does not take."""
        return self.rest.plan_attention(
            self.query_lens,
            self.total_lens,
            self.block_tables,
            block_size=self.block_size,
            window=self.window,
            device=self.device,
        )


class AttentionKernels:
    """The methods do what `ops` says under their names.

    rest: does what the library does not take.
    by_position: positions that come together are attended as they would be alone, to the bit.
    """

    def __init__(self, library: Library, rest: Kernels, *, by_position: bool) -> None:
        self._library = library
        self._rest = rest
        self._by_position = by_position
        self._scores: WeakKeyDictionary[AttentionScores, _DescribedScores] = WeakKeyDictionary()

    def plan_attention(
        self,
        query_lens: Sequence[int],
        total_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        window: int | None = None,
        device: torch.device,
    ) -> PagedPlan:
        count = len(query_lens)
        tables = np.concatenate([np.asarray(table, dtype=np.int64) for table in block_tables])
        lengths = np.array([len(table) for table in block_tables], dtype=np.int64)
        sequences = np.zeros((count, 5), dtype=np.int64)
        sequences[:, 1] = query_lens
        sequences[1:, 0] = np.cumsum(sequences[:-1, 1])
        sequences[:, 2] = total_lens
        sequences[:, 4] = tables.ctypes.data + (np.cumsum(lengths) - lengths) * tables.itemsize
        if window is not None:
            oldest = np.maximum(sequences[:, 2] - sequences[:, 1] + 1 - window, 0)
            sequences[:, 3] = oldest // block_size
            sequences[:, 4] += sequences[:, 3] * tables.itemsize
        return PagedPlan(
            query_lens=query_lens,
            total_lens=total_lens,
            block_tables=block_tables,
            block_size=block_size,
            window=window,
            device=device,
            memory=PlanTable(sequences, kept=tables),
            rest=self._rest,
        )

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: PagedPlan, scores: AttentionScores
    ) -> Tensor:
        if not takes(query, key_cache, value_cache) or query.stride(2) != 1:
            return self._rest.paged_attention(query, key_cache, value_cache, plan.of_rest, scores)
        tokens, heads, head_dim = query.shape
        out = empty((tokens, heads, head_dim), query.dtype)
        # csrc's `Shape`.
        shape = array(
            "q",
            (heads, key_cache.shape[2], head_dim, plan.block_size, plan.window or 0, *query.stride()[:2]),
        )
        how = self._described(scores)
        self._library.paged_attention(
            out.data_ptr(),
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            plan.memory.address,
            len(plan.query_lens),
            shape.buffer_info()[0],
            how.address,
            DTYPE_CODES[query.dtype],
            self._by_position,
            torch.get_num_threads(),
            keep=(shape, how),
        )
        return out

    def _described(self, scores: AttentionScores) -> _DescribedScores:
        described = self._scores.get(scores)
        if described is None:
            described = self._scores[scores] = _DescribedScores(scores)
        return described

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        if not takes(key, value, key_cache, value_cache) or key.stride(2) != 1 or value.stride(2) != 1:
            return self._rest.write_kv(key, value, key_cache, value_cache, slots)
        for rows, cache in ((key, key_cache), (value, value_cache)):
            self._library.write_kv(
                cache.data_ptr(),
                rows.data_ptr(),
                slots.data_ptr(),
                DTYPE_CODES[rows.dtype],
                *rows.shape,
                rows.stride(0),
                rows.stride(1),
                torch.get_num_threads(),
            )
        return None

    def rotate_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        tensors = (query, key, value, cos, sin, key_cache, value_cache)
        strides = query.stride(), key.stride(), value.stride()
        if (
            not takes(*tensors)
            or not all(stride[2] == 1 for stride in strides)
            or not (cos.is_contiguous() and sin.is_contiguous())
        ):
            return self._rest.rotate_and_write(*tensors, slots)
        tokens, heads, head_dim = query.shape
        # csrc's `RotatedWrite`.
        shape = array("q", (heads, key.shape[1], head_dim, cos.shape[-1]))
        for stride in strides:
            shape.extend(stride[:2])
        self._library.rotate_and_write(
            *[tensor.data_ptr() for tensor in (query, key, value, key_cache, value_cache, cos, sin, slots)],
            shape.buffer_info()[0],
            DTYPE_CODES[query.dtype],
            tokens,
            torch.get_num_threads(),
            keep=(shape,),
        )
        return query


class _DescribedScores:
    """address: of csrc's `Scores`, and what it points to."""

    def __init__(self, scores: AttentionScores) -> None:
        self._slopes = None if scores.slopes is None else scores.slopes.float()
        self._sinks = None if scores.sinks is None else scores.sinks.float()
        self._fields = array("b")
        self._fields.frombytes(
            _SCORES.pack(
                scores.scale,
                scores.softcap or 0.0,
                scores.slope_factor,
                0 if scores.slopes is None else DTYPE_CODES[scores.slopes.dtype],
                address(self._slopes) or 0,
                address(self._sinks) or 0,
            )
        )
        self.address = self._fields.buffer_info()[0]
