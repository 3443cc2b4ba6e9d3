"""Trainable tokens: rows of the embedding, or the head, with values of the adapter's own.

Source: peft/tuners/trainable_tokens (0.21). A LoRA with trainable_token_indices is compiled in `lora`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graftlm.adapters.config_values import read_token_ids
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.saved_modules import SavedModules
from graftlm.adapters.methods.token_rows import token_rows
from graftlm.adapters.module_tensors import ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import ConfigFields, parse_target_config
from graftlm.adapters.targets import check_target, select_targets, with_default_targets
from graftlm.errors import AdapterCorrupt, AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=frozenset({"token_indices"}),
    inert=frozenset({"init_weights"}),
    refused={"modules_to_save": "PEFT does not know it for this method"},
)
# The second is a copy that PEFT writes for a head tied to the embedding when both are targets.
ROLES = ("trainable_tokens_delta", "base_layer.trainable_tokens_delta")


def compile_trainable_tokens(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type TRAINABLE_TOKENS. On a tied base the embedding's rows are the head's too.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    sites = base.sites
    config = with_default_targets(parse_target_config(raw, FIELDS), (sites.embedding_path,))
    token_ids = read_token_ids("token_indices", raw.get("token_indices"))
    if not token_ids:
        raise AdapterCorrupt("adapter_config.json: token_indices is empty")
    targets = select_targets(config, sites, (sites.embedding_path, sites.head_path))
    reaches_both_ends = sites.tied_head and sites.embedding_path in targets
    if reaches_both_ends:
        targets |= {sites.head_path}
    builder = PatchBuilder(base)
    saved = SavedModules(config, tensors, base, [builder])
    saved.replace_modules()
    vocab_size = saved.vocab_size or sites.vocab_size
    if max(token_ids) >= vocab_size:
        raise AdapterIncompatible(f"there is a row for token {max(token_ids)}", allowed=f"tokens below {vocab_size}")
    values: dict[str, Tensor] = {}
    for module in tensors.modules_with(*ROLES):
        check_target(config, sites, targets, module)
        values[module] = _take_values(tensors, module, (len(token_ids), sites.embedding_size))
    if reaches_both_ends:
        values = dict.fromkeys((sites.embedding_path, sites.head_path), _same(values))
    for module, own in values.items():
        rows = token_rows(token_ids, own, base)
        if module == sites.embedding_path:
            builder.replace_embedding_rows(rows)
        else:
            builder.replace_head_rows(rows)
        builder.describe(module, "token rows")
    return CompiledAdapter(method="trainable tokens", builder=builder, vocab_size=saved.vocab_size)


def _take_values(tensors: ModuleTensors, module: str, shape: tuple[int, ...]) -> Tensor:
    found = {role: tensor for role in ROLES if (tensor := tensors.take(module, role)) is not None}
    for tensor in found.values():
        check_shape(f"{ROLES[0]} of {module}", tensor, shape)
    return _same(found)


def _same(values: Mapping[str, Tensor]) -> Tensor:
    """The one value that all of them are."""
    first = next(iter(values.values()), None)
    if first is None:
        raise AdapterCorrupt("trainable_tokens_delta of the embedding is missing")
    if not all(torch.equal(value, first) for value in values.values()):
        raise AdapterCorrupt("rows of the embedding and of the head tied to it differ", got=", ".join(values))
    return first
