"""`StoredTensors` that lie in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class MemoryTensors:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read_stored(self, name: str) -> Tensor:
        return self.tensors[name]
