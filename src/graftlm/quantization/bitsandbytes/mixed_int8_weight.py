"""LLM.int8(): inputs quantised too, but for the columns of a batch that hold an outlier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.errors import ConfigurationError
from graftlm.kernels import ops
from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.quantization.bitsandbytes.eight_bit_weight import EightBitWeight
from graftlm.quantization.dequantized import dequantized_matmul
from graftlm.quantization.weight import Weight


def with_outliers(weight: Weight, threshold: float | None) -> Weight:
    """An int8 weight that multiplies as LLM.int8() does; any other as it is. threshold: None leaves all as they are."""
    if threshold is None or not isinstance(weight, EightBitWeight):
        return weight
    return MixedInt8Weight(stored=weight, threshold=threshold)


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedInt8Weight:
    """A `Weight` whose rows depend on each other: an outlier of one takes its column out of the integer product of all.

    Semantics: columns of x with a value of at least `threshold` (in float16) are multiplied in x's dtype by the
    dequantised weight; the rest of each row is quantised to int8 by its largest magnitude, multiplied exactly, and
    scaled in float32. Gradients flow as through the dequantised weight.
    Source: LLM.int8(), arXiv 2208.07339; roundings are those of bitsandbytes 0.50's `MatMul8bitLt`.
    """

    stored: EightBitWeight
    threshold: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def quantization(self) -> str:
        return self.stored.quantization

    @property
    def format(self) -> str:
        return f"{self.stored.format}, inputs below {self.threshold:g} in int8"

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return dequantized_matmul(self.stored, x, bias)
        half = x.to(torch.float16)
        outliers = half.abs() >= self.threshold
        columns = outliers.any(dim=0).nonzero()[:, 0]
        inner = half.masked_fill(outliers, 0)
        largest = inner.abs().amax(dim=1, keepdim=True).float()
        factors = torch.where(largest == 0, 0.0, 127.0 / largest)
        codes = (inner * factors).round_().to(torch.int8)
        codes[:, columns] = 0
        sums = ops.integer_matmul(codes, self.stored.codes)
        out = sums * (largest * self.stored.absmax) * (1 / 127.0**2)
        if bias is not None:
            out += bias
        out = out.to(x.dtype)
        if len(columns):
            out.addmm_(x[:, columns], self.stored.columns(columns).to(x.dtype).t())
        return out

    def rows(self, ids: Tensor) -> Tensor:
        return self.stored.rows(ids)

    def part(self, start: int, stop: int) -> MixedInt8Weight:
        return MixedInt8Weight(stored=self.stored.part(start, stop), threshold=self.threshold)

    def column_part(self, start: int, stop: int) -> MixedInt8Weight:
        raise ConfigurationError(
            "with int8_threshold inputs are quantised by their whole row, which tensor parallel ranks do not see",
            do="leave int8_threshold or tensor_parallel out",
        )

    def grouped_codes(self) -> GroupedCodes | None:
        return None

    def dequantize(self) -> Tensor:
        return self.stored.dequantize()
