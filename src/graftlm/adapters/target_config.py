"""What the configs of all methods have in common: which modules they adapt, and what else they save.

A method declares its own fields; everything else in the file is read here, known to change nothing, or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from graftlm.adapters.config_values import (
    read_flag,
    read_layer_indices,
    read_layers_pattern,
    read_module_names,
    read_names,
    shown,
)
from graftlm.errors import AdapterCorrupt, AdapterUnsupported

logger = logging.getLogger(__name__)

# Provenance: changes nothing, whatever its value.
INERT_FIELDS = frozenset(
    {"peft_type", "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
)
READ_FIELDS = frozenset({"modules_to_save", "target_modules", "task_type"})
# Read here, but only part of some methods' configs.
LAYER_FIELDS = frozenset({"layers_pattern", "layers_to_transform"})

Bias = Literal["none", "all", "adapted"]


@dataclass(frozen=True, kw_only=True)
class ConfigFields:
    """The fields of one method's config, beside those every config has.

    read: what the method or `parse_target_config` understands. inert: what changes nothing when the adapter is applied,
    whatever its value. refused: field -> why its meaningful values are not served; null, false and empty are fine.
    """

    read: frozenset[str] = frozenset()
    inert: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Modules an adapter changes.

    target_modules, exclude_modules: names, or one regular expression. target_modules is None for the base's default.
    bias: whose biases are saved: nobody's, every module's, or the adapted modules'.
    ensures_tying: on a tied base, an adapter of one end is the other's too.
    """

    target_modules: tuple[str, ...] | str | None
    exclude_modules: tuple[str, ...] | str | None
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    bias: Bias
    ensures_tying: bool


def parse_target_config(raw: Mapping[str, Any], fields: ConfigFields) -> TargetConfig:
    """Check all field names of a parsed adapter_config.json and read those that choose modules.

    Raises:
        AdapterUnsupported: a field asks for something Graft does not serve, or is unknown and not empty.
        AdapterCorrupt: a field's value has the wrong type or range.
    """
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterUnsupported(
            "this task_type is not supported", got=shown(raw["task_type"]), allowed="CAUSAL_LM, null"
        )
    for name, reason in fields.refused.items():
        if raw.get(name):
            raise AdapterUnsupported(f"adapter_config.json: {name} is not supported: {reason}", got=shown(raw[name]))
    _check_unknown_fields(raw, fields)
    known = {name: value for name, value in raw.items() if name in READ_FIELDS | fields.read}
    _check_layer_fields(known)
    return TargetConfig(
        target_modules=read_module_names(known, "target_modules"),
        exclude_modules=read_module_names(known, "exclude_modules") or None,
        layers_to_transform=read_layer_indices(known.get("layers_to_transform")),
        layers_pattern=read_layers_pattern(known.get("layers_pattern")),
        modules_to_save=read_names(known, "modules_to_save"),
        bias=_bias(known.get("bias")),
        ensures_tying=read_flag("ensure_weight_tying", known.get("ensure_weight_tying")),
    )


def _check_unknown_fields(raw: Mapping[str, Any], fields: ConfigFields) -> None:
    known = INERT_FIELDS | READ_FIELDS | fields.read | fields.inert | fields.refused.keys()
    unknown = sorted(raw.keys() - known)
    meaningful = [name for name in unknown if raw[name]]
    if meaningful:
        raise AdapterUnsupported(
            f"adapter_config.json has fields Graft does not know: {shown(meaningful)}",
            do="remove them if they do not matter when the adapter is applied",
        )
    if unknown:
        logger.info("adapter_config.json: ignoring empty unknown fields %s", shown(unknown))


def _check_layer_fields(raw: Mapping[str, Any]) -> None:
    # The combinations PEFT refuses when a LoraConfig is made. Some methods' configs let them through and ignore them.
    for name in ("layers_to_transform", "layers_pattern"):
        if raw.get(name) and isinstance(raw.get("target_modules"), str):
            raise AdapterCorrupt(
                f"adapter_config.json: {name} needs target_modules to be a list", got=shown(raw["target_modules"])
            )
    if raw.get("layers_pattern") and raw.get("layers_to_transform") is None:
        raise AdapterCorrupt("adapter_config.json: layers_pattern needs layers_to_transform")


def _bias(value: object) -> Bias:
    """PEFT spells the last one with a method's name, and takes any: lora_only, vera_only."""
    if value is None or value == "none":
        return "none"
    if value == "all":
        return "all"
    if isinstance(value, str) and value.endswith("_only"):
        return "adapted"
    raise AdapterCorrupt(
        "adapter_config.json: bias has an unknown value", got=shown(value), allowed="none, all, lora_only"
    )
