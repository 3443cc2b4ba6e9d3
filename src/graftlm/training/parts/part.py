"""One kind of change that an adapter learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from graftlm.adapters.module_tensors import PEFT_PREFIX
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.training.dropout import Dropout


class ParameterKey(NamedTuple):
    """A parameter by the module it belongs to and its role there."""

    path: str
    role: str

    @property
    def name(self) -> str:
        """What PEFT saves it under."""
        return f"{PEFT_PREFIX}{self.path}.{self.role}"


class TrainablePart(Protocol):
    """Parameters of one kind, and how they change the base."""

    def fresh(self, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
        """All of its parameters as they are before the first update: together they change nothing yet."""
        ...

    def add_to(
        self, builder: PatchBuilder, values: Mapping[ParameterKey, Tensor], dropout: Dropout | None = None
    ) -> None:
        """Tell the builder what the parameters do, differentiable in `values`.

        Args:
            dropout: of the pass, for those whose inputs are masked; None for no mask.
        """
        ...
