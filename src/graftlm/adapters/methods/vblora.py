"""VB-LoRA: factors pieced together from one bank of vectors that all modules share.

Source: arXiv 2405.15179; peft/tuners/vblora (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config_values import read_flag, read_rank
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import FoldedLinear, Folding, LowRank
from graftlm.adapters.methods.ranked_config import parse_ranked_config
from graftlm.adapters.module_tensors import WHOLE_MODEL, ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS
    | {"bias", "exclude_modules", "num_vectors", "r", "save_only_topk_weights", "topk", "vector_length"},
    inert=frozenset({"fan_in_fan_out", "init_logits_std", "init_vector_bank_bound", "vblora_dropout"}),
)
LOGITS = ("vblora_logits_A", "vblora_logits_B")
ROLES = tuple(f"{role}{form}" for role in LOGITS for form in ("", "_topk_indices", "_topk_weights"))


def compile_vblora(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type VBLORA: W + B @ A.

    Every piece of `vector_length` elements of a row of A or column of B is a mix of the bank's `topk` vectors with the
    highest logits, weighted by the softmax of those.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_ranked_config(raw, FIELDS, default_rank=4)
    length = read_rank("vector_length", raw.get("vector_length"), default=256)
    num_vectors = read_rank("num_vectors", raw.get("num_vectors"), default=256)
    num_mixed = read_rank("topk", raw.get("topk"), default=2)
    is_short = read_flag("save_only_topk_weights", raw.get("save_only_topk_weights"))
    folding = Folding(config, tensors, base, base.sites.linears)
    bank = folding.saved.on_device(tensors.require(WHOLE_MODEL, "vblora_vector_bank")).float()
    if tuple(bank.shape) != (num_vectors, length) or num_mixed > num_vectors:
        raise AdapterCorrupt(
            "vblora_vector_bank has another shape than its config says",
            got=list(bank.shape),
            allowed=f"[{num_vectors}, {length}], with topk={num_mixed} of these mixed",
        )

    def mixed(linear: FoldedLinear, role: str, rows: int, columns: int) -> Tensor:
        """[rows, columns, length]."""
        if is_short:
            # The last weight is left out of the file: they add up to one.
            known = linear.require(f"{role}_topk_weights", rows, columns, num_mixed - 1)
            weights = torch.cat([known, 1 - known.sum(-1, keepdim=True)], dim=-1)
            indices = linear.require(f"{role}_topk_indices", rows, columns, num_mixed).long()
            if bool(((indices < 0) | (indices >= num_vectors)).any()):
                raise AdapterCorrupt(
                    f"{role}_topk_indices of {linear.path} name vectors beyond the bank's {num_vectors}"
                )
        else:
            logits, indices = linear.require(role, rows, columns, num_vectors).topk(num_mixed, dim=-1)
            weights = logits.softmax(-1)
        return (weights.unsqueeze(-1) * bank[indices]).sum(-2)

    def fold(linear: FoldedLinear) -> LowRank:
        if linear.in_features % length or linear.out_features % length:
            raise AdapterIncompatible(
                f"{linear.path} cannot be cut into pieces of vector_length={length}",
                got=f"[{linear.out_features}, {linear.in_features}]",
            )
        pieces_a = mixed(linear, LOGITS[0], config.rank, linear.in_features // length)
        pieces_b = mixed(linear, LOGITS[1], linear.out_features // length, config.rank)
        return LowRank(lora_a=pieces_a.flatten(1), lora_b=pieces_b.transpose(1, 2).flatten(0, 1))

    return folding.compile("VB-LoRA", ROLES, fold)
