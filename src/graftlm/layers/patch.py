"""What an adapter does to one layer: the run-time form of the adapter algebra (DESIGN §6).

`adapters/` compiles PEFT's methods to these; the layers apply them and never ask which method it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from graftlm.kernels.ops import LoraUpdate

# Name of a layer that can be patched, such as "layers.3.qkv"; unique in a model.
Slot = NewType("Slot", str)


@dataclass(frozen=True, kw_only=True)
class LinearPatch:
    """What an adapter does to one linear layer: y = W x + b + low_rank(x)."""

    low_rank: LoraUpdate

    @property
    def num_bytes(self) -> int:
        return self.low_rank.num_bytes


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows [start, stop) of a batch that carry the same adapter, and what it does to each layer it touches."""

    start: int
    stop: int
    patches: Mapping[Slot, LinearPatch]
