"""adapter_config.json of a LoRA: every field is read or refused.

Source of meanings and defaults: peft/tuners/lora/config.py (0.21).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graftlm.adapters.config_values import (
    first_match,
    read_flag,
    read_layer_ranges,
    read_number,
    read_numbers,
    read_rank,
    read_ranks,
    read_token_ids,
    shown,
)
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, TargetConfig, parse_target_config
from graftlm.errors import AdapterCorrupt, AdapterUnsupported

FIELDS = ConfigFields(
    read=LAYER_FIELDS
    | {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "kasa_config",
        "layer_replication",
        "lora_alpha",
        "lora_bias",
        "r",
        "rank_pattern",
        "target_parameters",
        "trainable_token_indices",
        "use_bdlora",
        "use_dora",
        "use_rslora",
    },
    # Training and initialisation.
    inert=frozenset(
        {
            "corda_config",
            "eva_config",
            "fan_in_fan_out",  # PEFT too goes by the layer's real type
            "loftq_config",
            "lora_dropout",
            "lora_ga_config",
            "megatron_config",
            "megatron_core",
            "monteclora_config",
            "qalora_group_size",
            "use_qalora",  # PEFT ignores it on bases that are not GPTQ
            "velora_config",
        }
    ),
    refused={
        "arrow_config": "it routes tokens among several adapters",
    },
)
Initialisation = Literal["plain", "pissa", "olora", "kasa"]
# What loading does to the base. Everything that is not here is refused, with the reason in REFUSED_INITIALISATIONS.
PLAIN_INITIALISATIONS = (True, False, None, "true", "gaussian", "orthogonal", "eva", "mica")
REFUSED_INITIALISATIONS = {
    "corda": "PEFT itself cannot load it unconverted",
    "loftq": "PEFT quantises the base again on loading, which cannot be reproduced",
    "lora_ga": "PEFT loads it without the start point it was trained from, so the result is not what was trained",
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig(TargetConfig):
    """What decides the arithmetic of a LoRA adapter. Patterns keep the file's order: the first match wins.

    target_parameters: ends of the names of parameters that are adapted like linear layers' weights.
    peft_version: which wrote the file, such as (0, 21, 2); zeros for those that did not say (up to 0.17).
    token_indices: module name -> rows it has of its own; the name "" stands for the input embedding.
    invocation_token_ids: of an activated LoRA (arXiv 2504.12397); empty for all others.
    layer_ranges: of the base's layers, which stand one after the other in place of its own stack; empty for that stack.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_dora: bool
    use_lora_bias: bool
    initialisation: Initialisation
    is_block_diagonal: bool
    target_parameters: tuple[str, ...]
    peft_version: tuple[int, int, int]
    token_indices: Mapping[str, tuple[int, ...]]
    invocation_token_ids: tuple[int, ...]
    layer_ranges: tuple[tuple[int, int], ...]

    def rank_of(self, path: str) -> int:
        return int(first_match(self.rank_pattern, path, self.rank))

    def scaling_of(self, path: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv 2312.03732)."""
        alpha = first_match(self.alpha_pattern, path, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_lora_config(raw: Mapping[str, Any]) -> LoraConfig:
    """Check a parsed adapter_config.json.

    Raises:
        AdapterUnsupported: a field asks for something Graft does not serve, or is unknown and not empty.
        AdapterCorrupt: a field's value has the wrong type or range.
    """
    invocation_token_ids = read_token_ids("alora_invocation_tokens", raw.get("alora_invocation_tokens"))
    if invocation_token_ids and raw.get("task_type") is None:
        raise AdapterUnsupported(
            "adapter_config.json: alora_invocation_tokens without a task_type: PEFT never activates such an adapter",
            allowed="task_type CAUSAL_LM",
        )
    layer_ranges = read_layer_ranges("layer_replication", raw.get("layer_replication"))
    initialisation: Initialisation = "kasa" if raw.get("kasa_config") else _initialisation(raw.get("init_lora_weights"))
    if layer_ranges and initialisation != "plain":
        raise AdapterUnsupported(
            "adapter_config.json: layer_replication with an initialisation that changes the base: "
            "PEFT takes it out of layers that share their weights, once for each",
            got=f"init_lora_weights={shown(raw.get('init_lora_weights'))}",
            do="save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    return LoraConfig(
        **vars(parse_target_config(raw, FIELDS)),
        rank=read_rank("r", raw.get("r"), default=8),
        alpha=read_number("lora_alpha", raw.get("lora_alpha"), default=8.0),
        use_rslora=read_flag("use_rslora", raw.get("use_rslora")),
        use_dora=read_flag("use_dora", raw.get("use_dora")),
        use_lora_bias=read_flag("lora_bias", raw.get("lora_bias")),
        initialisation=initialisation,
        is_block_diagonal=bool(raw.get("use_bdlora")),
        target_parameters=_target_parameters(raw.get("target_parameters")),
        peft_version=_peft_version(raw.get("peft_version")),
        token_indices=_token_indices(raw.get("trainable_token_indices")),
        invocation_token_ids=invocation_token_ids,
        layer_ranges=layer_ranges,
        rank_pattern=read_ranks(raw, "rank_pattern"),
        alpha_pattern=read_numbers(raw, "alpha_pattern"),
    )


def _initialisation(value: object) -> Initialisation:
    if value in PLAIN_INITIALISATIONS:
        return "plain"
    if value == "pissa":
        return "pissa"
    if value == "olora":
        return "olora"
    reason = REFUSED_INITIALISATIONS.get(str(value), "it is drawn anew on every load, or unknown")
    raise AdapterUnsupported(
        f"adapter_config.json: this init_lora_weights cannot be served: {reason}",
        got=shown(value),
        do="save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA",
    )


def _target_parameters(value: object) -> tuple[str, ...]:
    names: object = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterCorrupt(
            "adapter_config.json: target_parameters is not a list of strings", got=shown(value), allowed="a list"
        )
    return tuple(names)


def _peft_version(value: object) -> tuple[int, int, int]:
    """Of "0.19.1", "0.19.2.dev0" or "0.19.2.dev0@1a2b3c"."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", value) if isinstance(value, str) else None
    return (0, 0, 0) if match is None else (int(match[1]), int(match[2]), int(match[3]))


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    if not value:
        return {}
    by_module = value if isinstance(value, dict) else {"": value}
    return {str(name): read_token_ids("trainable_token_indices", indices) for name, indices in by_module.items()}
