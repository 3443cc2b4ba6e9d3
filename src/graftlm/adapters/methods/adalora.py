"""AdaLoRA: a LoRA in three factors whose ranks were pruned in training, down to none.

Source: arXiv 2303.10512; peft/tuners/adalora (0.21).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graftlm.adapters.config_values import read_number, read_rank, shown
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

VARIANT = "PEFT does not define it for AdaLoRA"
FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias", "exclude_modules", "init_r", "lora_alpha", "rank_pattern"},
    inert=frozenset(
        {
            "alpha_pattern",  # PEFT's AdaLoRA does not look at it
            "beta1",
            "beta2",
            "corda_config",
            "deltaT",
            "ensure_weight_tying",
            "eva_config",
            "fan_in_fan_out",
            "init_lora_weights",
            "lora_dropout",
            "lora_ga_config",
            "megatron_config",
            "megatron_core",
            "orth_reg_weight",
            "qalora_group_size",
            "r",  # init_r takes its place
            "target_r",
            "tfinal",
            "tinit",
            "total_step",
            "use_rslora",  # PEFT's AdaLoRA does not look at it
        }
    ),
    refused={
        "alora_invocation_tokens": VARIANT,
        "arrow_config": "it routes tokens among several adapters",
        "kasa_config": VARIANT,
        "layer_replication": "it is served for LoRA alone",
        "loftq_config": VARIANT,
        "lora_bias": VARIANT,
        "monteclora_config": VARIANT,
        "target_parameters": "it adapts the parameters of expert layers",
        "trainable_token_indices": "token rows are served with LoRA only",
        "use_bdlora": VARIANT,
        "use_dora": VARIANT,
        "use_qalora": VARIANT,
        "velora_config": VARIANT,
    },
)
# Kept out of a division by a rank of zero; part of the scaling PEFT applies.
RANK_OFFSET = 1e-5


def compile_adalora(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type ADALORA: W + alpha / (init_r + 1e-5) * lora_B @ (lora_E * lora_A).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    first_rank = read_rank("init_r", raw.get("init_r"), default=12)
    alpha = read_number("lora_alpha", raw.get("lora_alpha"), default=8.0)
    ranks = _kept_ranks(raw.get("rank_pattern"))

    def fold(linear: FoldedLinear) -> LowRank:
        rank = ranks.get(linear.path, first_rank)
        lora_a = linear.require("lora_A", rank, linear.in_features)
        lora_b = linear.require("lora_B", linear.out_features, rank)
        values = linear.require("lora_E", rank, 1)
        # Pruning does not change the divisor: it stays what it was when training began.
        scaling = (alpha if alpha > 0 else float(rank)) / (first_rank + RANK_OFFSET)
        return LowRank(lora_a=lora_a * values, lora_b=lora_b * scaling)

    folding = Folding(config, tensors, base, base.sites.linears)
    if unknown := sorted(ranks.keys() - folding.targets):
        raise AdapterIncompatible(
            "adapter_config.json: rank_pattern names modules that are not targeted in this base", got=shown(unknown)
        )
    return folding.compile("AdaLoRA", ("lora_A", "lora_B", "lora_E"), fold)


def _kept_ranks(pattern: object) -> dict[str, int]:
    """Module path -> rank left, from `<path>.lora_E` -> one truth value for each rank at the start."""
    if pattern is None:
        return {}
    if not isinstance(pattern, dict):
        raise AdapterCorrupt("adapter_config.json: rank_pattern is not an object", got=shown(pattern))
    ranks = {}
    for name, kept in pattern.items():
        match = re.fullmatch(r"(.+)\.lora_E(\.[^.]+)?", name)
        if match is None or not isinstance(kept, list) or not all(isinstance(item, bool) for item in kept):
            raise AdapterCorrupt(
                "adapter_config.json: rank_pattern does not say which ranks of a module are left",
                got=f"{shown(name)}: {shown(kept)}",
                allowed="<module>.lora_E: a list of true and false",
            )
        ranks[match.group(1)] = sum(kept)
    return ranks
