"""LoKr: the Kronecker product of two small matrices, each of which may be a low-rank product itself.

Source: arXiv 2309.14859 (LyCORIS); peft/tuners/lokr (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import ScaledConfig, parse_scaled_config
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.errors import AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"alpha", "alpha_pattern", "exclude_modules", "r", "rank_pattern"},
    inert=frozenset(
        {
            # How the factors were cut is read off their shapes.
            "decompose_both",
            "decompose_factor",
            "init_weights",
            "module_dropout",
            "rank_dropout",
            "rank_dropout_scale",
            "use_effective_conv2d",
        }
    ),
)
ROLES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def compile_lokr(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type LOKR: W + alpha / r * kron(w1, w2).

    With w1 = B1 @ A1 and w2 = B2 @ A2: kron(w1, w2) = kron(B1, B2) @ kron(A1, A2).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_scaled_config(raw, FIELDS, default_rank=8)

    def fold(linear: FoldedLinear) -> LowRank:
        first_a, first_b = _factors(linear, config, "lokr_w1")
        second_a, second_b = _factors(linear, config, "lokr_w2")
        shape = (len(first_b) * len(second_b), first_a.shape[1] * second_a.shape[1])
        if shape != (linear.out_features, linear.in_features):
            raise AdapterIncompatible(
                f"the product of lokr_w1 and lokr_w2 of {linear.path} has another shape in this base",
                got=str(list(shape)),
                allowed=f"[{linear.out_features}, {linear.in_features}]",
                do="load it over the base it was trained on",
            )
        return LowRank(
            lora_a=torch.kron(first_a, second_a),
            lora_b=torch.kron(first_b, second_b) * config.scaling_of(linear.path),
        )

    return Folding(config, tensors, base, base.sites.plain_linears).compile("LoKr", ROLES, fold)


def _factors(linear: FoldedLinear, config: ScaledConfig, role: str) -> tuple[Tensor, Tensor]:
    """(A, B) of the smallest rank whose product B @ A is w1 or w2."""
    matrix = linear.take(role, None, None)
    if matrix is None:
        rank = config.rank_of(linear.path)
        factor_b = linear.require(f"{role}_a", None, rank)
        factor_a = linear.require(f"{role}_b", rank, None)
        if rank < min(len(factor_b), factor_a.shape[1]):
            return factor_a, factor_b
        matrix = factor_b @ factor_a
    rows, columns = matrix.shape
    if rows <= columns:
        return matrix, torch.eye(rows, device=matrix.device)
    return torch.eye(columns, device=matrix.device), matrix
