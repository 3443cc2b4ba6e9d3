"""C3A: an update of circulant blocks.

Source: arXiv 2407.19342; peft/tuners/c3a (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import Dense, FoldedLinear, Folding
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.errors import AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias"},
    # The blocks' size is that of the kernels in the file.
    inert=frozenset({"block_size", "block_size_pattern", "init_weights"}),
)
ROLE = "c3a_kernel"


def compile_c3a(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type C3A: element (a, j) of block (m, n) is kernel[m, n, (j - a) mod b] / in.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)

    def fold(linear: FoldedLinear) -> Dense:
        kernel = linear.require(ROLE, None, None, None)
        rows, columns, size = kernel.shape
        if (rows * size, columns * size) != (linear.out_features, linear.in_features):
            raise AdapterIncompatible(
                f"{ROLE} of {linear.path} has another shape in this base",
                got=list(kernel.shape),
                allowed=f"blocks that make up [{linear.out_features}, {linear.in_features}]",
            )
        steps = torch.arange(size, device=kernel.device)
        blocks = kernel[:, :, (steps - steps[:, None]) % size]
        delta = blocks.permute(0, 2, 1, 3).reshape(linear.out_features, linear.in_features)
        return Dense(delta=delta / linear.in_features)

    return Folding(config, tensors, base, base.sites.plain_linears).compile("C3A", (ROLE,), fold)
