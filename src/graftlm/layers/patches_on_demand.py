"""Patches of linear layers that are made anew whenever a layer asks for its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from graftlm.layers.patch import LinearPatch, Slot


class PatchesOnDemand(Mapping[Slot, LinearPatch]):
    """`ModelPatch.linears` of an adapter that is being trained.

    What autograd keeps of a patch, copies of its factors, is kept by the layer that asked, and is gone with what else
    that layer keeps. A layer that is computed again asks again.
    """

    def __init__(self, makers: Mapping[Slot, Callable[[], LinearPatch]]) -> None:
        self._makers = makers

    def __getitem__(self, slot: Slot) -> LinearPatch:
        return self._makers[slot]()

    def __contains__(self, slot: object) -> bool:
        return slot in self._makers

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
