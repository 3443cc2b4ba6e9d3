"""Inputs of a layer rounded to eight bits while the model runs, each row on its own: none depends on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graftlm.kernels import ops

LOWEST, HIGHEST = -128, 127


class InputQuantizer(Protocol):
    """Rounds inputs to codes: x is about codes * scale."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def description(self) -> str:
        """For people, such as "static"."""
        ...

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, in] -> codes [T, in] int8, scale [T, 1] float32, which is NaN for rows that hold one."""
        ...

    def stored_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it, by name after the module's path and a dot."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticInputs:
    """One scale for all inputs, found by calibration; what lies beyond 127 steps is cut off.

    scale: [1], a float dtype, positive.
    """

    scale: Tensor

    @property
    def num_bytes(self) -> int:
        return self.scale.nbytes

    @property
    def description(self) -> str:
        return "static"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Codes cannot say NaN, and a model that has lost its way must not look sane.
        broken = x.isnan().any(dim=1, keepdim=True)
        scale = torch.where(broken, torch.nan, self.scale.float())
        return _codes(x, self.scale.float()), scale

    def stored_tensors(self) -> dict[str, Tensor]:
        return {"input_scale": self.scale}


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """A scale for each row, from the row itself: 127.5 steps to its largest magnitude.

    Source: compressed-tensors 0.20, compute_dynamic_scales_and_zp.
    """

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def description(self) -> str:
        return "per token"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(dim=1, keepdim=True) / ((HIGHEST - LOWEST) / 2)
        scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
        return _codes(x, scale), scale

    def stored_tensors(self) -> dict[str, Tensor]:
        return {}


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    steps = (ops.widened(x) / scale).nan_to_num(nan=0.0, posinf=HIGHEST, neginf=LOWEST)
    return steps.round_().clamp_(LOWEST, HIGHEST).to(torch.int8)
