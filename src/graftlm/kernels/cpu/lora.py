"""Low-rank updates in C++."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graftlm.kernels.cpu.calls import DTYPE_CODES, takes
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.reference.lora import LoraSegment, LoraUpdate


class LoraKernels:
    """The method does what `ops` says under its name.

    rest: does what the library does not take.
    by_row: a row gets the same bits in a segment of any length, which costs time where segments are long.
    """

    def __init__(self, library: Library, rest: Kernels, *, by_row: bool) -> None:
        self._library = library
        self._rest = rest
        self._by_row = by_row
        # What the library reads of an update: the addresses stay as long as its tensors do.
        self._described: WeakKeyDictionary[LoraUpdate, _Described] = WeakKeyDictionary()

    def lora(self, out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
        if not (takes(out) and takes(x) and x.stride(1) == out.stride(1) == 1):
            return self._rest.lora(out, x, segments)
        # csrc's `Segment`s.
        table, others = array("q"), []
        # Each by itself: which way a segment is computed must not depend on its neighbours.
        for segment in segments:
            start, stop, update = segment
            described = self._described.get(update)
            if described is None:
                described = self._described[update] = _Described(update)
            if described.address is None:
                others.append(segment)
            else:
                table.extend((start, stop, described.address))
        if others:
            self._rest.lora(out, x, others)
        if not table:
            return None
        self._library.lora(
            out.data_ptr(),
            x.data_ptr(),
            table.buffer_info()[0],
            len(table) // 3,
            DTYPE_CODES[out.dtype],
            DTYPE_CODES[x.dtype],
            x.shape[1],
            out.shape[1],
            x.stride(0),
            out.stride(0),
            self._by_row,
            torch.get_num_threads(),
        )
        return None


class _Described:
    """address: of csrc's `Update` with its `Expand`s; None where the library does not take the update."""

    def __init__(self, update: LoraUpdate) -> None:
        self.address: int | None = None
        # Of a single column any stride is right.
        if takes(*update.factors) and all(factor.shape[1] == 1 or factor.stride(1) == 1 for factor in update.factors):
            self._fields = array("q", _fields(update))
            self.address = self._fields.buffer_info()[0]


def _fields(update: LoraUpdate) -> Iterator[int]:
    shrink = update.shrink
    yield from (shrink.data_ptr(), shrink.stride(0), shrink.shape[1], DTYPE_CODES[shrink.dtype], len(update.expands))
    for expand in update.expands:
        yield from (expand.matrix.data_ptr(), expand.matrix.stride(0))
        yield from (expand.out_start, expand.out_stop, expand.rank_start, expand.rank_stop)
