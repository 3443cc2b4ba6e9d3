"""How large the inputs of every linear layer get while the model reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.layers.patch import Slot
from graftlm.models.decoder import Decoder
from graftlm.quantization import Weight
from graftlm.training.packed_batch import PackedBatch


@torch.no_grad()
def find_largest_inputs(decoder: Decoder, batches: Iterable[PackedBatch]) -> dict[str, float]:
    """Path of each linear module inside the decoder -> the largest magnitude among its inputs.

    Raises:
        CheckpointError: one of them is no number: the model is broken, or overflows in this dtype.
    """
    with _observed(decoder) as observed:
        for packed in batches:
            decoder.hidden(packed.batch, packed.key_values)
    largest = {slot: float(weight.largest) for slot, weight in observed.items()}
    for slot, value in largest.items():
        if not value < float("inf"):
            raise CheckpointError(f"the inputs of {slot} are not finite while the model reads", got=value)
    return {path: largest[site.slot] for path, site in decoder.sites.matrices.items() if site.slot in largest}


@contextmanager
def _observed(decoder: Decoder) -> Iterator[Mapping[Slot, _ObservedWeight]]:
    weights = {slot: linear.weight for slot, linear in decoder.linears.items()}
    observed = {slot: _ObservedWeight(weight) for slot, weight in weights.items()}
    try:
        for slot, linear in decoder.linears.items():
            linear.weight = observed[slot]
        yield observed
    finally:
        for slot, linear in decoder.linears.items():
            linear.weight = weights[slot]


class _ObservedWeight:
    """A `Weight` that notes the largest magnitude it is multiplied with, NaN if there is one."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self.largest = torch.zeros(())

    @property
    def shape(self) -> tuple[int, int]:
        return self._weight.shape

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    @property
    def format(self) -> str:
        return self._weight.format

    def grouped_codes(self) -> GroupedCodes | None:
        return self._weight.grouped_codes()

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.numel():
            self.largest = torch.maximum(self.largest.to(x.device), x.abs().amax().float())
        return self._weight.matmul(x, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight.rows(ids)

    def part(self, start: int, stop: int) -> Weight:
        return self._weight.part(start, stop)

    def column_part(self, start: int, stop: int) -> Weight:
        return self._weight.column_part(start, stop)

    def dequantize(self) -> Tensor:
        return self._weight.dequantize()
