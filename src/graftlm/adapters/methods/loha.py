"""LoHa: the elementwise product of two low-rank matrices.

Source: arXiv 2108.06098 (FedPara); peft/tuners/loha (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import parse_scaled_config
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"alpha", "alpha_pattern", "exclude_modules", "r", "rank_pattern"},
    # The convolution's option does nothing to a linear layer.
    inert=frozenset({"init_weights", "module_dropout", "rank_dropout", "use_effective_conv2d"}),
)
ROLES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def compile_loha(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type LOHA: W + alpha / r * (w1_a @ w1_b) * (w2_a @ w2_b).

    The product has rank r * r: its factors are all products of two columns, and of two rows (Khatri-Rao).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_scaled_config(raw, FIELDS, default_rank=8)

    def fold(linear: FoldedLinear) -> LowRank:
        rank, out_features, in_features = config.rank_of(linear.path), linear.out_features, linear.in_features
        first_b = linear.require("hada_w1_a", out_features, rank)
        first_a = linear.require("hada_w1_b", rank, in_features)
        second_b = linear.require("hada_w2_a", out_features, rank)
        second_a = linear.require("hada_w2_b", rank, in_features)
        return LowRank(
            lora_a=(first_a[:, None] * second_a).reshape(rank * rank, in_features),
            lora_b=(first_b[:, :, None] * second_b[:, None]).flatten(1) * config.scaling_of(linear.path),
        )

    return Folding(config, tensors, base, base.sites.plain_linears).compile("LoHa", ROLES, fold)
