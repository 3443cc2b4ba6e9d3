"""Low-rank updates in C++."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import numpy as np
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
        # What the library reads of an update: the addresses stay as long as its tensors do. None: it does not take it.
        self._updates: WeakKeyDictionary[LoraUpdate, np.ndarray | None] = WeakKeyDictionary()

    def lora(self, out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
        if not (takes(out) and takes(x) and x.stride(1) == out.stride(1) == 1):
            return self._rest.lora(out, x, segments)
        taken, others = [], []
        # Each by itself: which way a segment is computed must not depend on its neighbours.
        for segment in segments:
            update = self._update(segment.update)
            if update is None:
                others.append(segment)
            else:
                taken.append((segment.start, segment.stop, update.ctypes.data))
        self._rest.lora(out, x, others)
        if not taken:
            return None
        table = np.array(taken, dtype=np.int64)
        self._library.lora(
            out.data_ptr(),
            x.data_ptr(),
            table.ctypes.data,
            len(table),
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

    def _update(self, update: LoraUpdate) -> np.ndarray | None:
        """csrc's `Update` with its `Expand`s, as int64."""
        if update not in self._updates:
            self._updates[update] = _described(update)
        return self._updates[update]


def _described(update: LoraUpdate) -> np.ndarray | None:
    matrices = [update.shrink, *(expand.matrix for expand in update.expands)]
    # Of a single column any stride is right.
    if not takes(*matrices) or any(matrix.shape[1] != 1 != matrix.stride(1) for matrix in matrices):
        return None
    shrink = update.shrink
    fields = [shrink.data_ptr(), shrink.stride(0), shrink.shape[1], DTYPE_CODES[shrink.dtype], len(update.expands)]
    for expand in update.expands:
        fields += [expand.matrix.data_ptr(), expand.matrix.stride(0)]
        fields += [expand.out_start, expand.out_stop, expand.rank_start, expand.rank_stop]
    return np.array(fields, dtype=np.int64)
