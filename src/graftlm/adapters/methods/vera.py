"""VeRA: all modules share one random pair of projections; each has two vectors of its own.

Source: arXiv 2310.11454; peft/tuners/vera (0.21).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config_values import read_flag, read_seed
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import parse_ranked_config
from graftlm.adapters.module_tensors import WHOLE_MODEL, ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.errors import AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias", "projection_prng_key", "r", "save_projection"},
    inert=frozenset({"d_initial", "fan_in_fan_out", "init_weights", "vera_dropout"}),
)


def compile_vera(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type VERA: W + (lambda_b * B[:out]) @ (lambda_d * A[:, :in]).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_ranked_config(raw, FIELDS, default_rank=256)
    folding = Folding(config, tensors, base, base.sites.linears)
    shapes = [folding.saved.shape(path) for path in folding.targets]
    if not shapes:
        raise AdapterIncompatible(
            "target_modules names no linear layer of this base", got=str(config.target_modules)[:200]
        )
    out_features = max(shape[0] for shape in shapes)
    in_features = max(shape[1] for shape in shapes)
    if raw.get("save_projection") is None or read_flag("save_projection", raw["save_projection"]):
        shared_a = tensors.require(WHOLE_MODEL, "vera_A")
        shared_b = tensors.require(WHOLE_MODEL, "vera_B")
        _check_projections(shared_a, shared_b, config.rank, out_features, in_features)
    else:
        # PEFT, too, draws them anew even when they are in the file.
        tensors.drop("vera_A")
        tensors.drop("vera_B")
        key = read_seed("projection_prng_key", raw.get("projection_prng_key"), default=0)
        shared_a, shared_b = _draw_projections(key, config.rank, out_features, in_features)
    shared_a, shared_b = folding.saved.on_device(shared_a).float(), folding.saved.on_device(shared_b).float()

    def fold(linear: FoldedLinear) -> LowRank:
        scale_a = linear.require("vera_lambda_d", config.rank)
        scale_b = linear.require("vera_lambda_b", linear.out_features)
        return LowRank(
            lora_a=scale_a[:, None] * shared_a[:, : linear.in_features],
            lora_b=scale_b[:, None] * shared_b[: linear.out_features],
        )

    return folding.compile("VeRA", ("vera_lambda_b", "vera_lambda_d"), fold)


def _check_projections(shared_a: Tensor, shared_b: Tensor, rank: int, out_features: int, in_features: int) -> None:
    if tuple(shared_a.shape) != (rank, in_features) or tuple(shared_b.shape) != (out_features, rank):
        raise AdapterIncompatible(
            "vera_A and vera_B do not fit the targeted modules of this base",
            got=f"{list(shared_a.shape)} and {list(shared_b.shape)}",
            allowed=f"[{rank}, {in_features}] and [{out_features}, {rank}]",
        )


def _draw_projections(key: int, rank: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """What PEFT draws for a key, bit for bit: A then B from one CPU generator, Kaiming-uniform with gain sqrt(2)."""
    generator = torch.Generator(device="cpu").manual_seed(key)

    def draw(rows: int, columns: int) -> Tensor:
        bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns))
        return torch.empty(rows, columns, dtype=torch.float32).uniform_(-bound, bound, generator=generator)

    shared_a = draw(rank, in_features)
    return shared_a, draw(out_features, rank)
