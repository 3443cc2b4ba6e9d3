"""Prompt tuning and P-tuning: embeddings that stand before every prompt.

PEFT saves the same for both: what P-tuning's encoder computes is fixed once it is trained.
Sources: arXiv 2104.08691 (prompt tuning), 2103.10385 (P-tuning); peft/tuners/prompt_tuning, peft/tuners/p_tuning and
peft/peft_model.py (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.adapters.config_values import read_count, shown
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.token_rows import token_rows
from graftlm.adapters.module_tensors import WHOLE_MODEL, ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import ConfigFields, parse_target_config
from graftlm.errors import AdapterCorrupt, AdapterUnsupported
from graftlm.models.base_weights import BaseWeights

READ = frozenset({"num_transformer_submodules", "num_virtual_tokens"})
# Of the base it was trained on; the tensor's shape tells what matters.
BASE_SHAPE = frozenset({"num_attention_heads", "num_layers", "token_dim"})
REFUSED = {
    "modules_to_save": "modules replaced beside a learned prompt are not served",
    "target_modules": "a learned prompt belongs to no module",
}
PROMPT_TUNING_FIELDS = ConfigFields(
    read=READ,
    inert=BASE_SHAPE | {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path"},
    refused=REFUSED,
)
P_TUNING_FIELDS = ConfigFields(
    read=READ,
    inert=BASE_SHAPE
    | {"encoder_dropout", "encoder_hidden_size", "encoder_num_layers", "encoder_reparameterization_type"},
    refused=REFUSED,
)


def compile_prompt_tuning(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type PROMPT_TUNING.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    parse_target_config(raw, PROMPT_TUNING_FIELDS)
    return _compile_prompt("prompt tuning", raw, tensors, base)


def compile_p_tuning(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type P_TUNING.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    parse_target_config(raw, P_TUNING_FIELDS)
    return _compile_prompt("P-tuning", raw, tensors, base)


def read_num_virtual_tokens(raw: Mapping[str, Any]) -> int:
    """How many tokens a learned prompt or prefix has.

    Raises:
        AdapterUnsupported: it is for several submodules.
        AdapterCorrupt: there are none, or it is no number.
    """
    if raw.get("num_transformer_submodules") not in (None, 1):
        raise AdapterUnsupported(
            "adapter_config.json: a prompt for several submodules is not supported",
            got=f"num_transformer_submodules={shown(raw['num_transformer_submodules'])}",
            allowed="1",
        )
    count = read_count("num_virtual_tokens", raw.get("num_virtual_tokens"), 0)
    if count == 0:
        raise AdapterCorrupt("adapter_config.json: there are no virtual tokens", got="num_virtual_tokens=0")
    return count


def _compile_prompt(method: str, raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """The virtual tokens get ids beyond the vocabulary, which no prompt names and no logit has.

    What is saved for them is what PEFT puts beside the embedding's outputs, and no row of the embedding's table.
    """
    count = read_num_virtual_tokens(raw)
    embeddings = tensors.require(WHOLE_MODEL, "prompt_embeddings")
    check_shape("prompt_embeddings", embeddings, (count, base.sites.embedding_size))
    first = base.sites.vocab_size
    token_ids = tuple(range(first, first + count))
    builder = PatchBuilder(base)
    builder.add_inputs(token_rows(token_ids, embeddings, base))
    builder.describe(base.sites.embedding_path, f"{count} virtual tokens")
    return CompiledAdapter(method=method, builder=builder, virtual_token_ids=token_ids)
