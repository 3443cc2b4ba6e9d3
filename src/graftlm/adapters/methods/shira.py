"""SHiRA: a few elements of the weight, at places that the file names, get something added.

Source: arXiv 2406.13175; peft/tuners/shira (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import Dense, FoldedLinear, Folding
from graftlm.adapters.methods.ranked_config import parse_ranked_config
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import ConfigFields
from graftlm.errors import AdapterCorrupt
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=frozenset({"r"}),
    # The places that were drawn are in the file.
    inert=frozenset({"fan_in_fan_out", "init_weights", "mask_type", "random_seed"}),
)


def compile_shira(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type SHIRA: W with r * (out + in) elements added to.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_ranked_config(raw, FIELDS, default_rank=32)

    def fold(linear: FoldedLinear) -> Dense:
        out_features, in_features = linear.out_features, linear.in_features
        size = config.rank * (out_features + in_features)
        values = linear.require("shira_weight", size)
        # Kept in float32 on Windows, which holds them exactly up to 2^24.
        rows, columns = linear.require("shira_indices", 2, size).long()
        if bool(((rows < 0) | (rows >= out_features) | (columns < 0) | (columns >= in_features)).any()):
            raise AdapterCorrupt(f"shira_indices of {linear.path} lie outside [{out_features}, {in_features}]")
        delta = values.new_zeros(out_features, in_features)
        return Dense(delta=delta.index_put_((rows, columns), values, accumulate=True))

    return Folding(config, tensors, base, base.sites.plain_linears).compile(
        "SHiRA", ("shira_weight", "shira_indices"), fold
    )
