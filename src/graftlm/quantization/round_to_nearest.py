"""Integers by rounding to the nearest step. No calibration: at 4 bits it costs more quality than GPTQ or NF4 do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.grouped_integers import GroupedIntegers
from graftlm.quantization.packed_codes import PackedCodes

# The smallest float16: a scale of 0 would divide by zero.
SMALLEST_SCALE = 2.0**-24
LARGEST_SCALE = 65504.0


@dataclass(frozen=True, kw_only=True)
class RoundToNearest:
    """A `Quantizer` to symmetric integers in groups of a row's columns, with scales in float16.

    Semantics: scale = 2 * max|w| / (2**bits - 1) over the group, code = round(w / scale) + 2**(bits - 1), clamped.
    Source: AutoGPTQ 0.7, quantization/quantizer.py, find_params with sym=True.

    bits: 2 to 8. group_size: columns per group, of which the last may have fewer.
    """

    bits: int = 4
    group_size: int = 128

    def quantize(self, matrix: Tensor, *, dtype: torch.dtype) -> GroupedIntegers:
        rows, columns = matrix.shape
        middle = 1 << (self.bits - 1)
        largest = 2 * middle - 1
        num_groups = -(-columns // self.group_size)
        padded = functional.pad(matrix.float(), (0, -columns % self.group_size))
        groups = padded.view(rows, num_groups, self.group_size)
        scale = (2 * groups.abs().amax(-1) / largest).clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float16)
        codes = (groups / scale.float()[..., None]).round_().add_(middle).clamp_(0, largest)
        return GroupedIntegers(
            codes=PackedCodes.pack(codes.to(torch.uint8).flatten(1)[:, :columns], self.bits),
            scale=scale,
            zero=torch.full((rows, num_groups), middle, dtype=torch.uint8, device=matrix.device),
            columns=ColumnGroups(columns=columns, size=self.group_size),
            dtype=dtype,
        )

    def quantization_config(self, *, skipped_modules: Sequence[str]) -> dict[str, Any]:
        """What config.json says of a model whose layers are stored so. skipped_modules: linear ones that are not, the
        head among them."""
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
            "dynamic": {f"-:^{re.escape(path)}$": {} for path in skipped_modules},
        }
