"""Low-rank updates of many adapters in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoraExpand:
    """One `B` of a fused projection: columns [rank_start, rank_stop) of the shrunk rows to output columns
    [out_start, out_stop). matrix: [rank_stop - rank_start, out_stop - out_start], B transposed, with the scaling
    multiplied in."""

    matrix: Tensor
    out_start: int
    out_stop: int
    rank_start: int
    rank_stop: int


@dataclass(frozen=True, kw_only=True)
class LoraUpdate:
    """What one adapter adds to one layer. shrink: [in, R], the As of all its expands side by side, transposed."""

    shrink: Tensor
    expands: tuple[LoraExpand, ...]

    @property
    def num_bytes(self) -> int:
        return self.shrink.nbytes + sum(expand.matrix.nbytes for expand in self.expands)


class LoraSegment(NamedTuple):
    """Rows [start, stop) of a batch and the update they get."""

    start: int
    stop: int
    update: LoraUpdate


def lora(out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
    """Add each segment's low-rank update to its rows of `out`, in place.

    Semantics: for each segment s and expand e of its update:
        out[s.start:s.stop, e.out_start:e.out_stop] += (x[s.start:s.stop] @ shrink)[:, e.rank] @ e.matrix
    Rows outside the segments are untouched. The update is computed in its own dtype (float32) and rounded once,
    together with the base's result, to `out`'s dtype: what PEFT does for a single adapter.
    Args: x: [T, in]. out: [T, out]. segments: disjoint.
    Source: Punica, arXiv 2310.18547; rounding from peft/tuners/lora/layer.py.
    """
    for start, stop, update in segments:
        rows = x.narrow(0, start, stop - start)
        shrunk = torch.mm(rows.to(update.shrink.dtype), update.shrink)
        out_rows = out.narrow(0, start, stop - start)
        for expand in update.expands:
            target = out_rows.narrow(1, expand.out_start, expand.out_stop - expand.out_start)
            factors = shrunk.narrow(1, expand.rank_start, expand.rank_stop - expand.rank_start)
            if target.dtype == shrunk.dtype:
                target.addmm_(factors, expand.matrix)
            else:
                target.copy_(torch.addmm(target.to(shrunk.dtype), factors, expand.matrix))
