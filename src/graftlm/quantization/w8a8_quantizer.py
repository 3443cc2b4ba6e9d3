"""Eight-bit integers for weights and, by a scale found beforehand, for inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlm.quantization.quantized_inputs import HIGHEST, StaticInputs
from graftlm.quantization.w8a8_weight import W8A8Weight


@dataclass(frozen=True, kw_only=True)
class W8A8Quantizer:
    """A `Quantizer` to `W8A8Weight`, in the layout compressed-tensors calls int-quantized. Scales are in the compute
    dtype, as that library has them.

    Semantics: scale = max|w| / 127 over a row, code = round(w / scale); the inputs' scale = largest_input / 127.

    largest_input: magnitude that inputs have at most; larger ones are cut off.
    """

    largest_input: float

    def quantize(self, matrix: Tensor, *, dtype: torch.dtype) -> W8A8Weight:
        scale = _scale(matrix.abs().amax(dim=1, keepdim=True).float(), dtype)
        codes = (matrix.float() / scale.float()).round_().clamp_(-HIGHEST, HIGHEST).to(torch.int8)
        inputs = StaticInputs(scale=_scale(torch.tensor([self.largest_input], device=matrix.device), dtype))
        return W8A8Weight(codes=codes, scale=scale, inputs=inputs, dtype=dtype)

    @staticmethod
    def quantization_config(*, skipped_modules: Sequence[str]) -> dict[str, Any]:
        """What config.json says of a model whose layers are stored so. skipped_modules: linear ones that are not."""
        eight_bits = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
        group = {
            "targets": ["Linear"],
            "weights": {**eight_bits, "strategy": "channel"},
            "input_activations": {**eight_bits, "strategy": "tensor"},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(skipped_modules),
            "kv_cache_scheme": None,
        }


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The step with which `largest` is the last code; of what is always zero, the smallest there is."""
    return (largest / HIGHEST).to(dtype).clamp(min=torch.finfo(dtype).tiny)
