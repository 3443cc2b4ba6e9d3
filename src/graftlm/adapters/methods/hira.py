"""HiRA: the weight itself, elementwise times a low-rank matrix, is added to it.

Source: openreview TwJrTz9cRS (ICLR 2025); peft/tuners/hira (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import Dense, FoldedLinear, Folding
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"exclude_modules"},
    # The rank is that of the factors in the file: PEFT 0.21 writes rank_pattern, but makes every module with rank r.
    inert=frozenset({"fan_in_fan_out", "hira_dropout", "init_weights", "r", "rank_pattern"}),
)


def compile_hira(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type HIRA: W + W * (B @ A).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)

    def fold(linear: FoldedLinear) -> Dense:
        factor_a = linear.require("hira_A", None, linear.in_features)
        factor_b = linear.require("hira_B", linear.out_features, len(factor_a))
        return Dense(delta=linear.weight() * (factor_b @ factor_a))

    return Folding(config, tensors, base, base.sites.linears).compile("HiRA", ("hira_A", "hira_B"), fold)
