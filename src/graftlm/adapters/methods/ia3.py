"""IA3: learned factors for the outputs of attention projections and the inputs of feed-forward ones.

Sources: arXiv 2205.05638; peft/tuners/ia3 (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.config_values import read_module_names, shown
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.each_module import compile_each_module
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.patterns import FULL_NAME, pattern_match
from graftlm.adapters.target_config import ConfigFields, parse_target_config
from graftlm.adapters.targets import with_default_targets
from graftlm.errors import AdapterCorrupt
from graftlm.layers.transforms import Affine, InputScale
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=frozenset({"exclude_modules", "feedforward_modules"}), inert=frozenset({"fan_in_fan_out", "init_ia3_weights"})
)


def compile_ia3(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type IA3.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    feedforward = read_module_names(raw, "feedforward_modules")
    _check_feedforward(config.target_modules, feedforward)
    if feedforward is None:
        feedforward = base.sites.ia3_feedforward
    config = with_default_targets(config, base.sites.ia3_targets)

    def adapt(module: str, builder: PatchBuilder) -> None:
        site = base.sites.linears[module]
        factors = tensors.require(module, "ia3_l").to(base.device).float()
        if _is_feedforward(feedforward, module):
            check_shape(f"ia3_l of {module}", factors, (1, site.in_features))
            builder.transform_input(module, InputScale(factors=factors.flatten()))
        else:
            check_shape(f"ia3_l of {module}", factors, (site.out_features, 1))
            builder.transform_output(module, Affine(scale=factors.flatten()))

    return compile_each_module("IA3", config, tensors, base, role="ia3_l", adaptable=base.sites.linears, adapt=adapt)


def _check_feedforward(targets: tuple[str, ...] | str | None, feedforward: tuple[str, ...] | str | None) -> None:
    # PEFT compares the names themselves, not what they match, and only when both are lists.
    if isinstance(targets, tuple) and isinstance(feedforward, tuple) and not set(feedforward) <= set(targets):
        raise AdapterCorrupt(
            "adapter_config.json: feedforward_modules names modules that target_modules does not",
            got=shown(sorted(set(feedforward) - set(targets))),
        )


def _is_feedforward(names: tuple[str, ...] | str, path: str) -> bool:
    """A list compares with a bare `endswith`, not at a dot. Source: peft/tuners/ia3/model.py."""
    if isinstance(names, str):
        return pattern_match(FULL_NAME, names, path) is not None
    return any(path.endswith(name) for name in names)
