"""GraLoRA: the weight in k x k blocks, each with its own pair of factors, and optionally a LoRA over all of it.

Source: arXiv 2505.20355; peft/tuners/gralora (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graftlm.adapters.config_values import read_integer, read_number, read_rank
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import parse_ranked_config
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"alpha", "bias", "gralora_k", "hybrid_r", "r"},
    inert=frozenset({"fan_in_fan_out", "gralora_dropout", "init_weights"}),
)
ROLES = ("gralora_A", "gralora_B", "gralora_A_general.weight", "gralora_B_general.weight")


def compile_gralora(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type GRALORA.

    Block (row p, column n) of the update is alpha / (r + hybrid_r) * B_p[n].T @ A_n[p].T, where A_n[p] are columns
    [p * r / k, (p + 1) * r / k) of A[n] ([in / k, r]) and B_p[n] are rows [n * r / k, (n + 1) * r / k) of B[p]
    ([r, out / k]).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_ranked_config(raw, FIELDS, default_rank=32)
    alpha = read_number("alpha", raw.get("alpha"), default=64.0)
    num_blocks = read_rank("gralora_k", raw.get("gralora_k"), default=2)
    general_rank = read_integer("hybrid_r", raw.get("hybrid_r"), default=0)
    if config.rank % num_blocks or general_rank < 0:
        raise AdapterCorrupt(
            "adapter_config.json: gralora_k does not divide r, or hybrid_r is negative",
            got=f"r={config.rank}, gralora_k={num_blocks}, hybrid_r={general_rank}",
        )
    rank, share = config.rank, config.rank // num_blocks
    scaling = alpha / (rank + general_rank)

    def fold(linear: FoldedLinear) -> LowRank:
        out_features, in_features = linear.out_features, linear.in_features
        if out_features % num_blocks or in_features % num_blocks:
            raise AdapterIncompatible(
                f"{linear.path} cannot be cut into gralora_k={num_blocks} parts", got=f"[{out_features}, {in_features}]"
            )
        blocks_a = linear.require("gralora_A", num_blocks, in_features // num_blocks, rank)
        blocks_b = linear.require("gralora_B", num_blocks, rank, out_features // num_blocks)
        # Rank (n, p, s) takes input block n to output block p.
        lora_a = torch.block_diag(*blocks_a.transpose(1, 2))  # type: ignore[no-untyped-call]
        lora_b = lora_a.new_zeros(num_blocks, out_features // num_blocks, num_blocks, num_blocks, share)
        for row in range(num_blocks):
            by_column = blocks_b[row].reshape(num_blocks, share, out_features // num_blocks)
            lora_b[row, :, :, row] = by_column.permute(2, 0, 1)
        lora_b = lora_b.reshape(out_features, num_blocks * rank)
        if general_rank:
            general_a = linear.require("gralora_A_general.weight", general_rank, in_features)
            general_b = linear.require("gralora_B_general.weight", out_features, general_rank)
            lora_a, lora_b = torch.cat([lora_a, general_a]), torch.cat([lora_b, general_b], dim=1)
        return LowRank(lora_a=lora_a, lora_b=lora_b * scaling)

    return Folding(config, tensors, base, base.sites.linears).compile("GraLoRA", ROLES, fold)
