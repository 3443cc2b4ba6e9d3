"""Low-rank updates of adapters, one segment of rows at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


@dataclass(frozen=True, kw_only=True, eq=False)
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
    """`ops.lora`."""
    for segment in segments:
        factors = (segment.update.shrink, *(expand.matrix for expand in segment.update.expands))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *factors)):
            rows = x.narrow(0, segment.start, segment.stop - segment.start)
            _DifferentiableLora.apply(out, rows, segment, *factors)  # type: ignore[no-untyped-call]
        else:
            _add(out, x.narrow(0, segment.start, segment.stop - segment.start), segment)


def _add(out: Tensor, rows: Tensor, segment: LoraSegment) -> Tensor:
    """The shrunk rows, [rows, R]."""
    start, stop, update = segment
    shrunk = torch.mm(rows.to(update.shrink.dtype), update.shrink)
    out_rows = out.narrow(0, start, stop - start)
    for expand in update.expands:
        target = out_rows.narrow(1, expand.out_start, expand.out_stop - expand.out_start)
        factors = shrunk.narrow(1, expand.rank_start, expand.rank_stop - expand.rank_start)
        if target.dtype == shrunk.dtype:
            target.addmm_(factors, expand.matrix)
        else:
            target.copy_(torch.addmm(target.to(shrunk.dtype), factors, expand.matrix))
    return shrunk


class _DifferentiableLora(torch.autograd.Function):
    """One segment's update, with a backward of its own: torch would copy the whole gradient of `out` for every expand.

    Semantics: with g the gradient of the segment's rows of `out`: d matrix = shrunk.T @ g, u = g @ matrix.T,
    d shrink = rows.T @ u, d rows = u @ shrink.T; `out`'s own gradient passes unchanged. Sums run over the segment's own
    rows only, so no other segment can touch them.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, rows: Tensor, segment: LoraSegment, *factors: Tensor) -> Tensor:
        shrunk = _add(out, rows, segment)
        ctx.mark_dirty(out)
        ctx.segment = LoraSegment(segment.start, segment.stop, _spans(segment.update))
        ctx.save_for_backward(rows, shrunk, *factors)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, shrunk, shrink, *matrices = ctx.saved_tensors
        (gradient,) = gradients
        start, stop, update = ctx.segment
        own = gradient[start:stop].to(shrink.dtype)
        shrunk_gradient = torch.zeros_like(shrunk)
        matrix_gradients = []
        for expand, matrix in zip(update.expands, matrices, strict=True):
            columns = own[:, expand.out_start : expand.out_stop]
            ranks = slice(expand.rank_start, expand.rank_stop)
            shrunk_gradient[:, ranks] += columns @ matrix.t()
            matrix_gradients.append(shrunk[:, ranks].t() @ columns)
        rows_gradient = None
        if ctx.needs_input_grad[1]:
            rows_gradient = (shrunk_gradient @ shrink.t()).to(rows.dtype)
        shrink_gradient = rows.to(shrink.dtype).t() @ shrunk_gradient
        return gradient, rows_gradient, None, shrink_gradient, *matrix_gradients


def _spans(update: LoraUpdate) -> LoraUpdate:
    """The update's layout without its tensors, which are saved where autograd watches them."""
    nothing = torch.empty(0)
    expands = tuple(
        LoraExpand(
            matrix=nothing,
            out_start=expand.out_start,
            out_stop=expand.out_stop,
            rank_start=expand.rank_start,
            rank_stop=expand.rank_stop,
        )
        for expand in update.expands
    )
    return LoraUpdate(shrink=nothing, expands=expands)
