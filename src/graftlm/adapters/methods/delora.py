"""DeLoRA: a low-rank update whose strength is one number, apart from the directions of its factors.

Source: arXiv 2503.18225; peft/tuners/delora (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import parse_ranked_config
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias", "exclude_modules", "r", "rank_pattern"},
    # The trained strengths are in the file; the config has those that training began with.
    inert=frozenset({"delora_lambda", "init_weights", "lambda_pattern", "module_dropout"}),
)
ROLES = ("delora_A", "delora_B", "delora_lambda", "delora_w_norm")
# Lengths below this count as this.
MIN_NORM = 1e-4


def compile_delora(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type DELORA: W + B @ diag(lambda / (r |A_k| |B_k|)) @ (A * w_norm).

    w_norm: lengths of W's columns when training began.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_ranked_config(raw, FIELDS, default_rank=8)

    def fold(linear: FoldedLinear) -> LowRank:
        rank = config.rank_of(linear.path)
        lora_a = linear.require("delora_A", rank, linear.in_features)
        lora_b = linear.require("delora_B", linear.out_features, rank)
        strength = linear.require("delora_lambda", 1)
        lengths = linear.take("delora_w_norm", linear.in_features)
        if lengths is None:
            lengths = linear.weight().norm(dim=0)
        norms = lora_a.norm(dim=1).clamp(min=MIN_NORM) * lora_b.norm(dim=0).clamp(min=MIN_NORM)
        return LowRank(lora_a=lora_a * lengths, lora_b=lora_b * (strength / rank / norms))

    return Folding(config, tensors, base, base.sites.plain_linears).compile("DeLoRA", ROLES, fold)
