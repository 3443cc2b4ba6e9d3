"""HRA: the weight times a product of Householder reflections, which is a low-rank update of the weight.

Sources: arXiv 2405.17484; peft/tuners/hra (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config_values import read_flag, read_rank
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.errors import AdapterCorrupt
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"apply_GS", "bias", "exclude_modules", "r"}, inert=frozenset({"init_weights"})
)


def compile_hra(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type HRA.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    rank = read_rank("r", raw.get("r"), default=8)
    is_orthogonal = read_flag("apply_GS", raw.get("apply_GS"))

    def fold(linear: FoldedLinear) -> LowRank:
        vectors = linear.require("hra_u", linear.in_features, rank)
        norms = vectors.norm(dim=0)
        if not norms.all():
            raise AdapterCorrupt(f"hra_u of {linear.path} has a column of zeros, which is no direction to reflect")
        directions = torch.linalg.qr(vectors).Q if is_orthogonal else vectors / norms
        return LowRank(lora_a=directions.t(), lora_b=-(linear.weight() @ _reflected(directions)))

    return Folding(config, tensors, base, base.sites.plain_linears).compile("HRA", ("hra_u",), fold)


def _reflected(directions: Tensor) -> Tensor:
    """P, [in, r], with (1 - 2 u_1 u_1^T) ... (1 - 2 u_r u_r^T) = 1 - P U^T. directions: U, of unit columns."""
    overlaps = directions.t() @ directions
    reflected = torch.zeros_like(directions)
    for index in range(directions.shape[1]):
        earlier = reflected[:, :index] @ overlaps[:index, index]
        reflected[:, index] = 2 * (directions[:, index] - earlier)
    return reflected
