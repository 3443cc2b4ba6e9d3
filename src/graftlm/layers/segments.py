"""Which rows of a batch carry which adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from graftlm.kernels import ops
from graftlm.layers.patch import LinearPatch, ModelPatch, Slot


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows [start, stop) of a batch that carry the same adapter, and what it does."""

    start: int
    stop: int
    patch: ModelPatch

    def head_part(self, start: int, stop: int) -> Segment:
        """What of it is among rows [start, stop) of those that the output head sees, counted from `start`."""
        head, row = self.patch.head, max(start - self.start, 0)
        patch = replace(self.patch, head=head.from_row(row)) if row and head is not None else self.patch
        return Segment(start=self.start + row - start, stop=min(self.stop, stop) - start, patch=patch)


class Segments(Sequence[Segment]):
    """Disjoint segments of a batch, ascending; rows outside them are the base's.

    Every layer asks which of them change it. What can be answered for all layers together is found out once.

    slots: the linear layers that will ask, where these are few.
    plan: what `plan` is, where that is known.
    """

    def __init__(
        self,
        segments: Iterable[Segment] = (),
        *,
        slots: Sequence[Slot] | None = None,
        plan: ops.LoraPlan | None = None,
    ) -> None:
        self._segments = tuple(segments)
        self._slots = slots
        self._known_plan = plan

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | Sequence[Segment]:
        return self._segments[index]

    @cached_property
    def with_norms(self) -> tuple[Segment, ...]:
        """Those whose adapter replaces norms."""
        return tuple(segment for segment in self if segment.patch.norms)

    @cached_property
    def with_prefix(self) -> tuple[Segment, ...]:
        """Those whose adapter has keys and values of its own."""
        return tuple(segment for segment in self if segment.patch.prefix is not None)

    @property
    def are_low_rank(self) -> bool:
        """Whether they change layers by low-rank updates alone; token embedding and head are no layers here."""
        return not any(
            patch.norms or patch.prefix is not None or patch.stack is not None or patch.other_linears
            for patch in (segment.patch for segment in self)
        )

    def low_rank(self, slot: Slot) -> Iterable[ops.LoraSegment] | None:
        """The updates of the segments that change a linear layer by nothing else, for `ops.lora`; None if none do."""
        return self.plan.segments(slot)

    def patches(self, slot: Slot) -> list[tuple[int, int, LinearPatch]]:
        """(start, stop, patch) of the segments that change a linear layer by more."""
        return [
            (segment.start, segment.stop, patch)
            for segment in self._with_more
            if (patch := segment.patch.other_linears.get(slot)) is not None
        ]

    @cached_property
    def plan(self) -> ops.LoraPlan:
        """Of what `low_rank` answers."""
        if self._known_plan is not None:
            return self._known_plan
        adapters = [ops.AdapterRows(each.start, each.stop, each.patch.low_rank) for each in self]
        return ops.plan_lora(adapters, self._slots)

    @cached_property
    def _with_more(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self if segment.patch.other_linears)
