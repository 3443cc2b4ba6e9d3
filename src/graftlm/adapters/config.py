"""adapter_config.json: every field is read or refused.

Source of meanings and defaults: peft/tuners/lora/config.py (0.21).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        "ensure_weight_tying",  # both ends of a tied pair are in the file
        "eva_config",
        "fan_in_fan_out",  # PEFT too goes by the layer's real type
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "monteclora_config",
        "peft_version",
        "qalora_group_size",
        "revision",
        "use_qalora",  # PEFT ignores it on bases that are not GPTQ
        "velora_config",
    }
)
# Fields whose meaningful values are not served: refused by name, fine when null, false or empty.
REFUSED_FIELDS: dict[str, str] = {
    "arrow_config": "it routes tokens among several adapters",
    "layer_replication": "it needs another stack of layers than the base's",
    "target_parameters": "it adapts the parameters of expert layers",
}
READ_FIELDS = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "kasa_config",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_rslora",
    }
)
# What loading does to the base. Everything that is not here is refused, with the reason in REFUSED_INITIALISATIONS.
PLAIN_INITIALISATIONS = (True, False, None, "true", "gaussian", "orthogonal", "eva", "mica")
FOLDED_INITIALISATIONS = ("pissa", "olora")
REFUSED_INITIALISATIONS = {
    "corda": "PEFT itself cannot load it unconverted",
    "loftq": "PEFT quantises the base again on loading, which cannot be reproduced",
    "lora_ga": "PEFT loads it without the start point it was trained from, so the result is not what was trained",
}
# JSON integers have no limit, floats do.
MAX_INTEGER = 1 << 63


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What decides the arithmetic of a LoRA adapter. Patterns keep the file's order: the first match wins.

    token_indices: module name -> rows it has of its own; the name "" stands for the input embedding.
    invocation_token_ids: of an activated LoRA (arXiv 2504.12397); empty for all others.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_dora: bool
    use_lora_bias: bool
    bias: Literal["none", "all", "lora_only"]
    initialisation: Literal["plain", "pissa", "olora", "kasa"]
    is_block_diagonal: bool
    modules_to_save: tuple[str, ...]
    token_indices: Mapping[str, tuple[int, ...]]
    invocation_token_ids: tuple[int, ...]
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
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterUnsupported(
            "this task_type is not supported", got=repr(raw["task_type"]), allowed="CAUSAL_LM, null"
        )
    for field, reason in REFUSED_FIELDS.items():
        if raw.get(field):
            raise AdapterUnsupported(
                f"adapter_config.json: {field} is not supported: {reason}", got=repr(raw[field])[:200]
            )
    _check_unknown_fields(raw)
    _check_layer_fields(raw)
    return LoraConfig(
        rank=_rank("r", raw.get("r"), default=8),
        alpha=_number("lora_alpha", raw.get("lora_alpha"), default=8.0),
        use_rslora=_flag("use_rslora", raw.get("use_rslora")),
        use_dora=_flag("use_dora", raw.get("use_dora")),
        use_lora_bias=_flag("lora_bias", raw.get("lora_bias")),
        bias=_bias(raw.get("bias")),
        initialisation="kasa" if raw.get("kasa_config") else _initialisation(raw.get("init_lora_weights")),
        is_block_diagonal=bool(raw.get("use_bdlora")),
        modules_to_save=_names(raw, "modules_to_save"),
        token_indices=_token_indices(raw.get("trainable_token_indices")),
        invocation_token_ids=_token_ids("alora_invocation_tokens", raw.get("alora_invocation_tokens")),
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
    unknown = sorted(raw.keys() - INERT_FIELDS - REFUSED_FIELDS.keys() - READ_FIELDS)
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


def _names(raw: Mapping[str, Any], field: str) -> tuple[str, ...]:
    names = _module_names(raw, field)
    return (names,) if isinstance(names, str) else names or ()


def _bias(value: object) -> Literal["none", "all", "lora_only"]:
    if value is None or value == "none":
        return "none"
    if value == "all":
        return "all"
    if value == "lora_only":
        return "lora_only"
    raise AdapterCorrupt(
        "adapter_config.json: bias has an unknown value", got=repr(value)[:200], allowed="none, all, lora_only"
    )


def _initialisation(value: object) -> Literal["plain", "pissa", "olora"]:
    if value in PLAIN_INITIALISATIONS:
        return "plain"
    if value == "pissa":
        return "pissa"
    if value == "olora":
        return "olora"
    reason = REFUSED_INITIALISATIONS.get(str(value), "it is drawn anew on every load, or unknown")
    raise AdapterUnsupported(
        f"adapter_config.json: this init_lora_weights cannot be served: {reason}",
        got=repr(value)[:200],
        do="save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
    )


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    if not value:
        return {}
    by_module = value if isinstance(value, dict) else {"": value}
    return {str(name): _token_ids("trainable_token_indices", indices) for name, indices in by_module.items()}


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    ids: Any = [] if value is None else value
    valid = isinstance(ids, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < MAX_INTEGER for item in ids
    )
    if not valid:
        raise AdapterCorrupt(f"adapter_config.json: {field} is not made of token ids", got=repr(value)[:200])
    return tuple(ids)


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
