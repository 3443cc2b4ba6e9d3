"""Eight-bit weights that are multiplied with eight-bit inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graftlm.errors import ConfigurationError
from graftlm.kernels import ops
from graftlm.quantization.dequantized import dequantized_turned_matmul, frozen_matmul
from graftlm.quantization.quantized_inputs import InputQuantizer
from graftlm.quantization.row_weight import RowWeight
from graftlm.quantization.weight import Weight


@dataclass(frozen=True, kw_only=True, eq=False)
class W8A8Weight(RowWeight):
    """A `Weight` whose product is one of integers, exact up to a single rounding at the end.

    Semantics: w[n, k] = codes[n, k] * scale[n]; x @ W.T is computed as (input codes @ codes.T) * input scale * scale.
    Rounding inputs has no slope: the gradient passes through as if x had not been rounded.

    codes: int8 [out, in]. scale: [out, 1], a float dtype.
    """

    codes: Tensor
    scale: Tensor
    inputs: InputQuantizer

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.inputs.num_bytes

    @property
    def format(self) -> str:
        return f"w8a8, {self.inputs.description}"

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return frozen_matmul(x, bias, self._product, partial(dequantized_turned_matmul, self))

    def pick(self, rows: slice | Tensor) -> W8A8Weight:
        return W8A8Weight(codes=self.codes[rows], scale=self.scale[rows], inputs=self.inputs, dtype=self.dtype)

    def column_part(self, start: int, stop: int) -> Weight:
        raise ConfigurationError(
            "weights whose inputs are rounded to eight bits cannot be divided by inputs: a row is rounded as one",
            got=self.format,
            do="divide the model by layers (workers), or serve it with quantization='none'",
        )

    def decode(self) -> Tensor:
        return self.codes.float().mul_(self.scale.float())

    def stored_tensors(self) -> dict[str, Tensor]:
        """As `StorableWeight`: compressed-tensors' int-quantized."""
        return {"weight": self.codes, "weight_scale": self.scale, **self.inputs.stored_tensors()}

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes, input_scale = self.inputs.quantize(x)
        out = ops.integer_matmul(codes, self.codes).to(ops.widened(x).dtype)
        out *= input_scale * self.scale.float().t()
        if bias is not None:
            out += bias
        return out.to(x.dtype)
