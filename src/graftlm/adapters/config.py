"""adapter_config.json: every field is read or refused.

Source of meanings and defaults: peft/tuners/lora/config.py (0.21).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.adapters.patterns import FULL_NAME, LAYER_INDEX, NAME_ENDING, check_pattern, pattern_match
from graftlm.errors import AdapterCorrupt, AdapterUnsupported

logger = logging.getLogger(__name__)

# Fields that change nothing when the adapter is applied, whatever their value: provenance, training, initialisation.
INERT_FIELDS = frozenset(
    {
        "peft_type",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",  # PEFT too goes by the layer's real type
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
    }
)
# Fields whose meaningful values are not served yet: refused by name, fine when null, false, empty or "none".
REFUSED_FIELDS = frozenset(
    {
        "alora_invocation_tokens",
        "arrow_config",
        "bias",
        "ensure_weight_tying",
        "kasa_config",
        "layer_replication",
        "lora_bias",
        "modules_to_save",
        "monteclora_config",
        "target_parameters",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_qalora",
        "velora_config",
    }
)
READ_FIELDS = frozenset(
    {
        "alpha_pattern",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Initialisations that leave the base alone. PiSSA, OLoRA, CorDA and LoftQ change it, and are refused.
PLAIN_INITIALISATIONS = (True, False, None, "true", "gaussian", "orthogonal", "eva", "mica")
# JSON integers have no limit, floats do.
MAX_INTEGER = 1 << 63


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What decides the arithmetic of a LoRA adapter. Patterns keep the file's order: the first match wins."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str | None
    exclude_modules: tuple[str, ...] | str | None
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def rank_of(self, path: str) -> int:
        return int(_first_match(self.rank_pattern, path, self.rank))

    def scaling_of(self, path: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732)."""
        alpha = _first_match(self.alpha_pattern, path, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_lora_config(raw: Mapping[str, Any]) -> LoraConfig:
    """Check a parsed adapter_config.json.

    Raises:
        AdapterUnsupported: a field asks for something Graft does not serve, or is unknown and not empty.
        AdapterCorrupt: a field's value has the wrong type or range.
    """
    peft_type = raw.get("peft_type")
    if peft_type != "LORA":
        raise AdapterUnsupported("this peft_type is not supported", got=_shown(peft_type), allowed="LORA")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterUnsupported(
            "this task_type is not supported", got=_shown(raw["task_type"]), allowed="CAUSAL_LM, null"
        )
    for field in sorted(REFUSED_FIELDS):
        if raw.get(field) and not (field == "bias" and raw[field] == "none"):
            raise AdapterUnsupported(f"adapter_config.json: {field} is not supported", got=_shown(raw[field]))
    initialisation = raw.get("init_lora_weights")
    if initialisation not in PLAIN_INITIALISATIONS:
        raise AdapterUnsupported(
            "adapter_config.json: init_lora_weights names a method that changes the base",
            got=_shown(initialisation),
            do="save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    _check_unknown_fields(raw)
    _check_layer_fields(raw)
    return LoraConfig(
        rank=_rank("r", raw.get("r"), default=8),
        alpha=_number("lora_alpha", raw.get("lora_alpha"), default=8.0),
        use_rslora=_flag("use_rslora", raw.get("use_rslora")),
        rank_pattern={key: _rank("rank_pattern", value) for key, value in _patterns(raw, "rank_pattern").items()},
        alpha_pattern={key: _number("alpha_pattern", value) for key, value in _patterns(raw, "alpha_pattern").items()},
        target_modules=_module_names(raw, "target_modules"),
        exclude_modules=_module_names(raw, "exclude_modules") or None,
        layers_to_transform=_layer_indices(raw.get("layers_to_transform")),
        layers_pattern=_layers_pattern(raw.get("layers_pattern")),
    )


def _shown(value: object) -> str:
    """A value as it may stand in a message: a config can be megabytes."""
    return repr(value)[:200]


def _check_unknown_fields(raw: Mapping[str, Any]) -> None:
    unknown = sorted(raw.keys() - INERT_FIELDS - REFUSED_FIELDS - READ_FIELDS)
    meaningful = [field for field in unknown if raw[field]]
    if meaningful:
        raise AdapterUnsupported(
            f"adapter_config.json has fields Graft does not know: {_shown(meaningful)}",
            do="remove them if they do not matter when the adapter is applied",
        )
    if unknown:
        logger.info("adapter_config.json: ignoring empty unknown fields %s", _shown(unknown))


def _check_layer_fields(raw: Mapping[str, Any]) -> None:
    # The same combinations PEFT refuses when a LoraConfig is made.
    for field in ("layers_to_transform", "layers_pattern"):
        if raw.get(field) and isinstance(raw.get("target_modules"), str):
            raise AdapterCorrupt(
                f"adapter_config.json: {field} needs target_modules to be a list", got=_shown(raw["target_modules"])
            )
    if raw.get("layers_pattern") and raw.get("layers_to_transform") is None:
        raise AdapterCorrupt("adapter_config.json: layers_pattern needs layers_to_transform")


def _first_match(patterns: Mapping[str, float], path: str, default: float) -> float:
    for pattern, value in patterns.items():
        if pattern_match(NAME_ENDING, pattern, path):
            return value
    return default


def _rank(field: str, value: object, default: int | None = None) -> int:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterCorrupt(
            f"adapter_config.json: {field} is not a rank", got=_shown(value), allowed="an integer from 1"
        )
    return value


def _number(field: str, value: object, default: float | None = None) -> float:
    value = default if value is None else value
    number = value if isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_INTEGER) else math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not a finite number", got=_shown(value))
    return float(number)


def _flag(field: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not true or false", got=_shown(value))
    return bool(value)


def _patterns(raw: Mapping[str, Any], field: str) -> dict[str, Any]:
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not an object", got=type(patterns).__name__)
    for pattern in patterns:
        check_pattern(field, NAME_ENDING, pattern)
    return patterns


def _module_names(raw: Mapping[str, Any], field: str) -> tuple[str, ...] | str | None:
    names = raw.get(field)
    if names is None:
        return None
    if isinstance(names, str):
        if names.lower() != "all-linear":
            check_pattern(field, FULL_NAME, names)
        return names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterCorrupt(f"adapter_config.json: {field} is not a string or a list of strings", got=_shown(names))
    return tuple(names)


def _layer_indices(value: object) -> tuple[int, ...]:
    indices = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in indices):
        raise AdapterCorrupt("adapter_config.json: layers_to_transform is not made of layer indices", got=_shown(value))
    return tuple(indices)


def _layers_pattern(value: object) -> tuple[str, ...]:
    patterns: list[Any] = [] if not value else value if isinstance(value, list) else [value]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise AdapterCorrupt("adapter_config.json: layers_pattern is not made of strings", got=_shown(value))
    for pattern in patterns:
        check_pattern("layers_pattern", LAYER_INDEX, pattern)
    return tuple(patterns)
