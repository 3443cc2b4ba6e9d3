"""Low-rank updates in C++."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from graftlm.kernels.cpu.calls import DTYPE_CODES, takes
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.cpu.plan_table import PlanTable
from graftlm.kernels.kernel_set import Kernels, LoraPlan
from graftlm.kernels.reference.lora import AdapterRows, LoraSegment, LoraUpdate, LoraUpdates


class LoraKernels:
    """The methods do what `ops` says under their names.

    rest: does what the library does not take.
    by_row: a row gets the same bits in a segment of any length, which costs time where segments are long.
    """

    def __init__(self, library: Library, rest: Kernels, *, by_row: bool) -> None:
        self._library = library
        self._rest = rest
        self._by_row = by_row
        # What the library reads of an update: the addresses stay as long as its tensors do.
        self._described: WeakKeyDictionary[LoraUpdate, _Described] = WeakKeyDictionary()
        # The same of all of an adapter's updates, by the layers' places.
        self._addresses: WeakKeyDictionary[LoraUpdates, np.ndarray | None] = WeakKeyDictionary()
        self._places: dict[str, int] = {}

    def plan_lora(self, adapters: Sequence[AdapterRows], layers: Sequence[str] | None) -> LoraPlan:
        addresses = [self._addresses_of(adapter.updates) for adapter in adapters]
        taken = [own for own in addresses if own is not None]
        if len(taken) < len(adapters):
            return self._rest.plan_lora(adapters, layers)
        places = self._places
        # Layers that no adapter has changed yet have no place.
        asked = None if layers is None else [places[layer] for layer in layers if layer in places]
        # csrc's `Segment`s, of each layer in turn; adapters that do not change a layer have no update there.
        table = np.zeros((len(places) if asked is None else len(asked), len(adapters), 3), dtype=np.int64)
        table[:, :, :2] = [(adapter.start, adapter.stop) for adapter in adapters]
        for index, own in enumerate(taken):
            whole = np.pad(own, (0, len(places) - len(own))) if len(own) < len(places) else own
            table[:, index, 2] = whole if asked is None else whole[asked]
        names = tuple(places) if layers is None else tuple(layer for layer in layers if layer in places)
        return _Plan(adapters=adapters, layers=names, memory=PlanTable(table))

    def _addresses_of(self, updates: LoraUpdates) -> np.ndarray | None:
        """For each layer's place the address of its update, or 0; None if the library does not take them all."""
        if updates in self._addresses:
            return self._addresses[updates]
        places = [self._places.setdefault(layer, len(self._places)) for layer in updates.by_layer]
        found = [self._describe(update).address for update in updates.by_layer.values()]
        addresses = None
        if None not in found:
            addresses = np.zeros(len(self._places), dtype=np.int64)
            addresses[places] = np.array(found, dtype=np.int64)
        self._addresses[updates] = addresses
        return addresses

    def _describe(self, update: LoraUpdate) -> _Described:
        described = self._described.get(update)
        if described is None:
            described = self._described[update] = _Described(update)
        return described

    def lora(self, out: Tensor, x: Tensor, segments: Iterable[LoraSegment]) -> None:
        if not (takes(out) and takes(x) and x.stride(1) == out.stride(1) == 1):
            return self._rest.lora(out, x, segments)
        if isinstance(segments, _PlannedSegments):
            return self._add(out, x, segments.address, segments.count)
        table, others = array("q"), []
        # Each by itself: which way a segment is computed must not depend on its neighbours.
        for segment in segments:
            start, stop, update = segment
            described = self._describe(update)
            if described.address is None:
                others.append(segment)
            else:
                table.extend((start, stop, described.address))
        if others:
            self._rest.lora(out, x, others)
        if table:
            self._add(out, x, table.buffer_info()[0], len(table) // 3, keep=(table,))
        return None

    def _add(self, out: Tensor, x: Tensor, segments: int, count: int, keep: Sequence[object] = ()) -> None:
        """segments: the address of `count` of csrc's `Segment`s."""
        self._library.lora(
            out.data_ptr(),
            x.data_ptr(),
            segments,
            count,
            DTYPE_CODES[out.dtype],
            DTYPE_CODES[x.dtype],
            x.shape[1],
            out.shape[1],
            x.stride(0),
            out.stride(0),
            self._by_row,
            torch.get_num_threads(),
            keep=keep,
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """layers: that may be asked about. memory: csrc's `Segment`s of each of them, [layers, adapters, 3]."""

    adapters: Sequence[AdapterRows]
    layers: tuple[str, ...]
    memory: PlanTable

    def segments(self, layer: str) -> Iterable[LoraSegment] | None:
        start = self._starts.get(layer)
        return None if start is None else _PlannedSegments(self, layer, start)

    @property
    def layout(self) -> Hashable:
        """As `RecordablePlan`: which layers are changed. The number of adapters counts by powers of two."""
        return self.layers, self._is_changed.tobytes(), self._capacity

    def held(self) -> _Plan:
        """As `RecordablePlan`."""
        return replace(self, memory=self.memory.copy(capacity=self._capacity))

    @property
    def count(self) -> int:
        """How many segments each layer has; those beyond the adapters are empty."""
        count: int = self.memory.entries.shape[1]
        return count

    @property
    def _capacity(self) -> int:
        return 1 << (len(self.adapters) - 1).bit_length()

    @cached_property
    def _is_changed(self) -> np.ndarray:
        changed: np.ndarray = np.any(self.memory.entries[:, :, 2], axis=1)
        return changed

    @cached_property
    def _starts(self) -> dict[str, int]:
        """Where a layer's segments are, if any has an update."""
        entries, address = self.memory.entries, self.memory.address
        return {
            layer: address + place * entries.strides[0]
            for place, (layer, changed) in enumerate(zip(self.layers, self._is_changed, strict=True))
            if changed
        }


class _PlannedSegments:
    """A layer's segments, laid out for the library already. address: of the first of `count`; some have no update."""

    def __init__(self, plan: _Plan, layer: str, address: int) -> None:
        self._plan = plan
        self._layer = layer
        self.address = address
        self.count = plan.count

    def __iter__(self) -> Iterator[LoraSegment]:
        """For what the library does not take."""
        for start, stop, updates in self._plan.adapters:
            update = updates.by_layer.get(self._layer)
            if update is not None:
                yield LoraSegment(start, stop, update)


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
