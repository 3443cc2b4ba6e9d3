"""Letting go of the rest of a matrix of which only a part is kept."""

from __future__ import annotations

import copy
import dataclasses
from typing import TypeVar

from torch import Tensor

Owner = TypeVar("Owner")


def with_own_memory(part: Owner) -> Owner:
    """A part of a weight, or of its scales, with copies of the tensors that are views of larger ones."""
    copied = copy.copy(part)
    attributes = vars(copied)
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            attributes[name] = value.clone()
        elif dataclasses.is_dataclass(value):
            attributes[name] = with_own_memory(value)
    return copied
