"""RoAd: pairs of a module's outputs are rotated and scaled.

Sources: arXiv 2409.00119; peft/tuners/road (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graftlm.adapters.config_values import read_count, shown
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.each_module import compile_each_module
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import ConfigFields, parse_target_config
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.layers.transforms import PairRotation
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(read=frozenset({"group_size", "variant"}), inert=frozenset({"init_weights"}))
# Angles, and scales, for every two outputs: one for both, one for each, or one for each of the matrix's entries.
ANGLES_PER_PAIR = {"road_1": 1, "road_2": 2, "road_4": 4}


def compile_road(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type ROAD.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    variant = raw.get("variant", "road_1")
    if not isinstance(variant, str) or variant not in ANGLES_PER_PAIR:
        raise AdapterCorrupt(
            "adapter_config.json: variant is unknown", got=shown(variant), allowed=", ".join(ANGLES_PER_PAIR)
        )
    group_size = read_count("group_size", raw.get("group_size"), 64)
    if group_size == 0 or group_size % 2:
        raise AdapterCorrupt("adapter_config.json: group_size is not a positive even number", got=group_size)

    def adapt(module: str, builder: PatchBuilder) -> None:
        out_features = base.sites.linears[module].out_features
        if out_features % group_size:
            raise AdapterIncompatible(
                f"the outputs of {module} do not divide into groups", got=out_features, allowed=f"x * {group_size}"
            )
        theta = tensors.require(module, "road_theta").to(base.device).float()
        alpha = tensors.require(module, "road_alpha").to(base.device).float()
        shape = (out_features // 2 * ANGLES_PER_PAIR[variant],)
        check_shape(f"road_theta of {module}", theta, shape)
        check_shape(f"road_alpha of {module}", alpha, shape)
        straight_alpha, crossed_alpha = _columns(alpha, variant, group_size)
        straight_theta, crossed_theta = _columns(theta, variant, group_size)
        builder.transform_output(
            module,
            PairRotation(
                straight=straight_alpha * straight_theta.cos(),
                crossed=crossed_alpha * crossed_theta.sin(),
                group_size=group_size,
            ),
        )

    return compile_each_module(
        "RoAd", config, tensors, base, role="road_theta", adaptable=base.sites.plain_linears, adapt=adapt
    )


def _columns(values: Tensor, variant: str, group_size: int) -> tuple[Tensor, Tensor]:
    """One value for each output: for itself and for its partner."""
    if variant == "road_1":
        values = values.view(-1, 1, group_size // 2).expand(-1, 2, -1).flatten()
    if variant == "road_4":
        straight, crossed = values.view(-1, 2, group_size).unbind(dim=1)
        return straight.flatten(), crossed.flatten()
    return values, values
