"""Low-rank updates of many adapters in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoraExpand:
    """One `B` of a fused projection: reads columns [rank_start, rank_stop) of the shrunk rows, writes output columns
    [out_start, out_stop). lora_b: [out_stop - out_start, rank_stop - rank_start], with alpha / rank multiplied in."""

    lora_b: Tensor
    out_start: int
    out_stop: int
    rank_start: int
    rank_stop: int


@dataclass(frozen=True, kw_only=True)
class LoraSegment:
    """Rows [start, stop) of a batch and the update they get. lora_a: [R, in], the As of all expands stacked."""

    start: int
    stop: int
    lora_a: Tensor
    expands: tuple[LoraExpand, ...]


def lora(out: Tensor, x: Tensor, segments: Sequence[LoraSegment]) -> None:
    """Add each segment's low-rank update to its rows of `out`, in place.

    Semantics: for each segment s and expand e of s:
        out[s.start:s.stop, e.out_start:e.out_stop] += (x[s.start:s.stop] @ s.lora_a.T)[:, e.rank] @ e.lora_b.T
    Rows outside the segments are untouched. The update is computed in the adapter's dtype (float32) and rounded once,
    together with the base's result, to `out`'s dtype: what PEFT does for a single adapter.
    Args: x: [T, in]. out: [T, out]. segments: disjoint.
    Source: Punica, arXiv 2310.18547; rounding from peft/tuners/lora/layer.py.
    """
    for segment in segments:
        rows = x[segment.start : segment.stop]
        shrunk = torch.mm(rows.to(segment.lora_a.dtype), segment.lora_a.t())
        for expand in segment.expands:
            target = out[segment.start : segment.stop, expand.out_start : expand.out_stop]
            columns = shrunk[:, expand.rank_start : expand.rank_stop]
            if target.dtype == shrunk.dtype:
                target.addmm_(columns, expand.lora_b.t())
            else:
                target.copy_(torch.addmm(target.to(shrunk.dtype), columns, expand.lora_b.t()))
