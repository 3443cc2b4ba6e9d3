"""MiSS: shards of the input are added up and go through one small matrix.

Source: arXiv 2409.15371; peft/tuners/miss (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graftlm.adapters.config_values import read_rank, shown
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import Dense, FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import parse_ranked_config
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.errors import AdapterIncompatible, AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias", "exclude_modules", "init_weights", "mini_r", "r"},
    inert=frozenset({"miss_dropout"}),
)


def compile_miss(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type MISS.

    With x cut into shards of r (the last one padded with zeros): W x + block.T @ sum(shards). For "mini", block is
    repeated over the outputs. "bat" depends on the base: of each r x r tile w, w + w @ block + block.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_ranked_config(raw, FIELDS, default_rank=64)
    rank, kind = config.rank, raw.get("init_weights")
    narrow = read_rank("mini_r", raw.get("mini_r"), default=1) if kind == "mini" else None
    if kind not in (None, True, False, "bat", "mini"):
        raise AdapterUnsupported(
            "adapter_config.json: this init_weights is not known", got=shown(kind), allowed="true, false, bat, mini"
        )

    def fold(linear: FoldedLinear) -> LowRank:
        block = linear.require("miss_block", rank, linear.out_features if narrow is None else narrow)
        if narrow is not None:
            _check_divisible(linear, linear.out_features % narrow == 0, f"mini_r={narrow}")
            block = block.repeat(1, linear.out_features // narrow)
        shards = torch.arange(linear.in_features, device=block.device) % rank
        sums = torch.nn.functional.one_hot(shards, num_classes=rank).t().float()
        return LowRank(lora_a=sums, lora_b=block.t())

    def fold_tiles(linear: FoldedLinear) -> Dense:
        out_features, in_features = linear.out_features, linear.in_features
        _check_divisible(linear, out_features % rank == 0 and in_features % rank == 0, f"r={rank}")
        blocks = linear.require("miss_block", out_features // rank, rank, rank)
        tiles = linear.weight().reshape(out_features // rank, rank, in_features // rank, rank)
        delta = torch.einsum("oaib,obc->oaic", tiles, blocks) + blocks[:, :, None, :]
        return Dense(delta=delta.reshape(out_features, in_features))

    return Folding(config, tensors, base, base.sites.plain_linears).compile(
        "MiSS", ("miss_block",), fold_tiles if kind == "bat" else fold
    )


def _check_divisible(linear: FoldedLinear, divisible: bool, what: str) -> None:
    if not divisible:
        raise AdapterIncompatible(
            f"{linear.path} cannot be cut into parts of {what}", got=f"[{linear.out_features}, {linear.in_features}]"
        )
