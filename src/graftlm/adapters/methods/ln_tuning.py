"""LN tuning: norms with weights of the adapter's own.

Sources: arXiv 2312.11420; peft/tuners/ln_tuning (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.each_module import compile_each_module
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import ConfigFields, parse_target_config
from graftlm.adapters.targets import with_default_targets
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(read=frozenset({"exclude_modules"}))
ROLE = "ln_tuning_layers.weight"
BIAS_ROLE = "ln_tuning_layers.bias"


def compile_ln_tuning(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type LN_TUNING. PEFT would copy whole linear layers too; only norms are served.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = with_default_targets(parse_target_config(raw, FIELDS), base.sites.ln_tuning_targets)

    def adapt(module: str, builder: PatchBuilder) -> None:
        site = base.sites.norms[module]
        weight = tensors.require(module, ROLE)
        check_shape(f"{ROLE} of {module}", weight, (site.size,))
        bias = None
        if site.has_bias:
            bias = tensors.require(module, BIAS_ROLE)
            check_shape(f"{BIAS_ROLE} of {module}", bias, (site.size,))
        builder.replace_norm(module, weight, bias)

    return compile_each_module("LN tuning", config, tensors, base, role=ROLE, adaptable=base.sites.norms, adapt=adapt)
