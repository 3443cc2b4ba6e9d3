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
        stacks: layer modules that hold all experts of a layer -> transformers' parameter, which stacks them too. Where
            they are in blocks, each is a tensor of its own here, with its index behind the parameter's name.
        alternating: of the stacks, those whose rows stand by turns with the rows of another module's.
        parameters: tensors in a layer, with ".weight" -> transformers' names of what is no module's weight or bias.
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
    stacks: Mapping[str, str] = field(default_factory=dict)
    alternating: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    single_rows: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    in_config: frozenset[str] = frozenset()
