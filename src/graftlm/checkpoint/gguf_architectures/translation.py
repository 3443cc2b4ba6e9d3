"""What a GGUF file's architecture means in transformers' terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Puts the rows [out, ...] of a tensor, numbers or blocks alike, back into transformers' order.
RowOrder = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Translation:
    """How one file becomes a checkpoint. Modules are named without ".weight" and ".bias".

    Args:
        config: config.json's keys as transformers spells them.
        modules: llama.cpp's names of modules outside the layers -> transformers'.
        layer: where transformers keeps its layers; {} is the index.
        layer_modules: llama.cpp's names of modules in a layer -> transformers'. {expert} in the latter stands for the
            index into a tensor that holds all experts.
        row_orders: layer modules whose rows llama.cpp's converter moved.
        transposed: layer modules whose weights transformers stores as [in, out].
        single_rows: layer modules with one row, which some converters write as a vector.
        norm_offset: what the converter added to the weight of every norm.
        in_config: tensors that are part of the config here, not weights.
    """

    config: Mapping[str, Any]
    modules: Mapping[str, str]
    layer: str
    layer_modules: Mapping[str, str]
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    single_rows: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    in_config: frozenset[str] = frozenset()
