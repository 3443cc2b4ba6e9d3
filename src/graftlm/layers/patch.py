"""What an adapter does to one layer: the run-time form of the adapter algebra (DESIGN §6).

`adapters/` compiles PEFT's methods to these; the layers apply them and never ask which method it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from torch import Tensor

from graftlm.kernels.ops import LoraExpand

# Name of a layer that can be patched, such as "model.layers.3.self_attn.qkv"; unique in a model.
Slot = NewType("Slot", str)


@dataclass(frozen=True, kw_only=True)
class LinearPatch:
    """Low-rank update of one linear layer: y += (x @ lora_a.T)[:, e.rank] @ e.lora_b.T for each of its expands e.

    lora_a: [R, in], the As of all parts of a fused projection stacked, so that one product serves q, k and v.
    """

    lora_a: Tensor
    expands: tuple[LoraExpand, ...]

    @property
    def num_bytes(self) -> int:
        return self.lora_a.nbytes + sum(expand.lora_b.nbytes for expand in self.expands)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows [start, stop) of a batch that carry the same adapter, and what it does to each layer it touches."""

    start: int
    stop: int
    patches: Mapping[Slot, LinearPatch]
