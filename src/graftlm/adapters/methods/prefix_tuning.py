"""Prefix tuning: keys and values that stand before every prompt, in every layer.

Sources: arXiv 2101.00190; peft/tuners/prefix_tuning and PeftModel.get_prompt (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graftlm.adapters.config_values import shown
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.prompt_tuning import REFUSED, read_num_virtual_tokens
from graftlm.adapters.module_tensors import WHOLE_MODEL, ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.adapters.target_config import ConfigFields, parse_target_config
from graftlm.errors import AdapterIncompatible, AdapterUnsupported
from graftlm.layers.patch import PrefixPatch
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=frozenset({"num_attention_heads", "num_transformer_submodules", "num_virtual_tokens"}),
    # What an encoder computed is saved, and the encoder is not.
    inert=frozenset({"encoder_hidden_size", "init_weights", "num_layers", "prefix_projection", "token_dim"}),
    refused=REFUSED,
)


def compile_prefix_tuning(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type PREFIX_TUNING.

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    parse_target_config(raw, FIELDS)
    count = read_num_virtual_tokens(raw)
    num_heads, head_dim = _key_shape(base)
    if raw.get("num_attention_heads") not in (None, num_heads):
        raise AdapterIncompatible(
            "adapter_config.json: the prefix was made for another number of key-value heads",
            got=f"num_attention_heads={shown(raw['num_attention_heads'])}",
            allowed=str(num_heads),
        )
    saved = tensors.require(WHOLE_MODEL, "prompt_embeddings")
    num_layers = len(base.sites.key_shapes)
    check_shape("prompt_embeddings", saved, (count, num_layers * 2 * num_heads * head_dim))
    builder = PatchBuilder(base)
    builder.add_prefix(_prefix(saved.view(count, num_layers, 2, num_heads, head_dim), base))
    builder.describe(base.sites.embedding_path, f"{count} virtual tokens in every layer")
    # Any id will do: what is computed for these tokens is put out of the way before anybody sees it.
    return CompiledAdapter(method="prefix tuning", builder=builder, virtual_token_ids=(0,) * count)


def _key_shape(base: BaseWeights) -> tuple[int, int]:
    """Heads and head size of the keys, the same in all layers."""
    shapes = set(base.sites.key_shapes)
    if len(shapes) != 1:
        raise AdapterUnsupported("prefix tuning over a base whose layers have keys of different sizes is not supported")
    return shapes.pop()


def _prefix(saved: Tensor, base: BaseWeights) -> PrefixPatch:
    """saved: [n, layers, 2, K, D], keys before values."""
    moved = saved.to(base.device, base.dtype)
    return PrefixPatch(
        keys=tuple(layer[:, 0].contiguous() for layer in moved.unbind(1)),
        values=tuple(layer[:, 1].contiguous() for layer in moved.unbind(1)),
    )
