"""Low-rank updates of adapters, one segment of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graftlm.kernels.reference.precision import widened


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
    """What one adapter adds to one layer. shrink: [in, R], the As of all its expands side by side, transposed.

    All factors have one dtype: float32, or bfloat16 where they are kept in it, to be widened when they are used.
    """

    shrink: Tensor
    expands: tuple[LoraExpand, ...]

    @property
    def num_bytes(self) -> int:
        return self.shrink.nbytes + sum(expand.matrix.nbytes for expand in self.expands)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self.shrink, *(expand.matrix for expand in self.expands)

    def widened(self) -> LoraUpdate:
        """In float32 at least."""
        return self._map(widened)

    def rounded(self) -> LoraUpdate:
        """In bfloat16."""
        return self._map(Tensor.bfloat16)

    def narrowed(self) -> LoraUpdate:
        """In bfloat16, if its factors are float32 numbers that bfloat16 holds exactly: half the memory to keep and to
        read, and the same results."""
        narrow = self.rounded()
        pairs = zip(self.factors, narrow.factors, strict=True)
        is_exact = all(wide.dtype == torch.float32 and torch.equal(wide, other.float()) for wide, other in pairs)
        return narrow if is_exact else self

    def _map(self, change: Callable[[Tensor], Tensor]) -> LoraUpdate:
        expands = tuple(replace(expand, matrix=change(expand.matrix)) for expand in self.expands)
        return LoraUpdate(shrink=change(self.shrink), expands=expands)


class LoraSegment(NamedTuple):
    """Rows [start, stop) of a batch and the update they get."""

    start: int
    stop: int
    update: LoraUpdate


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraUpdates:
    """One adapter's updates by the layers they are added to, whatever the caller calls these."""

    by_layer: Mapping[str, LoraUpdate]


class AdapterRows(NamedTuple):
    """Rows [start, stop) of a batch and the updates they get, layer by layer."""

    start: int
    stop: int
    updates: LoraUpdates


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """`ops.LoraPlan`."""

    adapters: Sequence[AdapterRows]

    def segments(self, layer: str) -> list[LoraSegment] | None:
        found = [
            LoraSegment(start, stop, update)
            for start, stop, updates in self.adapters
            if (update := updates.by_layer.get(layer)) is not None
        ]
        return found or None


def plan_lora(adapters: Sequence[AdapterRows], layers: Sequence[str] | None) -> LoraPlan:
    """`ops.plan_lora`."""
    return LoraPlan(adapters=adapters)


def lora(out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
    """`ops.lora`."""
    segments = tuple(segments)
    if torch.is_grad_enabled():
        factors = tuple(factor for segment in segments for factor in segment.update.factors)
        if any(tensor.requires_grad for tensor in (x, *factors)):
            _DifferentiableLora.apply(out, x, segments, *factors)  # type: ignore[no-untyped-call]
            return
    for segment in segments:
        _add(out, x, segment)


def _add(out: Tensor, x: Tensor, segment: LoraSegment) -> Tensor:
    """The shrunk rows, [rows, R]."""
    start, stop, update = segment
    shrink = widened(update.shrink)
    shrunk = torch.mm(x.narrow(0, start, stop - start).to(shrink.dtype), shrink)
    out_rows = out.narrow(0, start, stop - start)
    for expand in update.expands:
        target = out_rows.narrow(1, expand.out_start, expand.out_stop - expand.out_start)
        factors = shrunk.narrow(1, expand.rank_start, expand.rank_stop - expand.rank_start)
        matrix = widened(expand.matrix)
        exact = target.to(shrunk.dtype).addmm_(factors, matrix)
        if exact is not target:
            target.copy_(exact)
    return shrunk


class _DifferentiableLora(torch.autograd.Function):
    """All segments' updates, with a backward of their own: torch would copy the whole gradients of `out` and `x` for
    every segment and expand.

    Semantics: with g the gradient of a segment's rows of `out`: d matrix = shrunk.T @ g, u = g @ matrix.T,
    d shrink = x.T @ u, d x = u @ shrink.T; `out`'s own gradient passes unchanged. Sums run over the segment's own
    rows only, so no other segment can touch them. Gradients of factors are laid out as those of PEFT's matrices are,
    of which the factors are transposed views.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, segments: tuple[LoraSegment, ...], *factors: Tensor) -> Tensor:
        shrunk = [_add(out, x, segment) for segment in segments]
        ctx.mark_dirty(out)
        ctx.spans = [LoraSegment(segment.start, segment.stop, _spans(segment.update)) for segment in segments]
        ctx.save_for_backward(x, *shrunk, *factors)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        spans: list[LoraSegment] = ctx.spans
        shrunk, factors = saved[: len(spans)], iter(saved[len(spans) :])
        dtype = saved[-1].dtype
        x_gradient = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        factor_gradients: list[Tensor] = []
        for (start, stop, update), shrunk_rows in zip(spans, shrunk, strict=True):
            shrink = next(factors)
            own, own_rows = (rows.narrow(0, start, stop - start) for rows in (gradients[0], x))
            shrunk_gradient = torch.zeros_like(shrunk_rows)
            matrix_gradients = []
            for expand in update.expands:
                # Widened a part at a time: all of it would be the largest tensor of the pass.
                columns = own.narrow(1, expand.out_start, expand.out_stop - expand.out_start).to(dtype)
                ranks = expand.rank_start, expand.rank_stop - expand.rank_start
                shrunk_gradient.narrow(1, *ranks).addmm_(columns, next(factors).t())
                matrix_gradients.append(torch.mm(columns.t(), shrunk_rows.narrow(1, *ranks)).t())
            factor_gradients += [torch.mm(shrunk_gradient.t(), own_rows.to(dtype)).t(), *matrix_gradients]
            if x_gradient is not None:
                x_gradient.narrow(0, start, stop - start).copy_(torch.mm(shrunk_gradient, shrink.t()))
        return gradients[0], x_gradient, None, *factor_gradients


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
