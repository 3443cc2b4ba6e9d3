"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from graftlm.checkpoint.gguf_architectures.decoder_config import (
    decoder_config,
    rope_parameters,
    whole_rotary_head_dim,
)
from graftlm.checkpoint.gguf_architectures.llama import ATTENTION_MODULES, LAYER, MLP_MODULES, MODULES
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError

EXPERT_MODULES = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
SHARED_EXPERT_MODULES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
HEAD_NORM_MODULES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def translate_qwen2(file: GGUFFile) -> Translation:
    config = {
        **decoder_config(file),
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(file),
        "use_sliding_window": False,
    }
    width = whole_rotary_head_dim(file)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise CheckpointError("the heads of a qwen2 GGUF do not share the hidden size", got=f"key_length {width}")
    return Translation(config=config, modules=MODULES, layer=LAYER, layer_modules={**ATTENTION_MODULES, **MLP_MODULES})


def translate_qwen3(file: GGUFFile) -> Translation:
    return Translation(
        config={
            **decoder_config(file),
            "model_type": "qwen3",
            "head_dim": whole_rotary_head_dim(file),
            "hidden_act": "silu",
            "rope_parameters": rope_parameters(file),
            "attention_bias": "blk.0.attn_q.bias" in file.tensor_names(),
            "use_sliding_window": False,
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules={**ATTENTION_MODULES, **MLP_MODULES, **HEAD_NORM_MODULES},
    )


def translate_qwen2moe(file: GGUFFile) -> Translation:
    """A router's chosen probabilities are taken as they are, as llama.cpp takes them."""
    config = {
        **decoder_config(file),
        **_expert_config(file),
        "model_type": "qwen2_moe",
        "num_experts": file.integer("{arch}.expert_count"),
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(file),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensor_names(),
        "shared_expert_intermediate_size": file.integer(
            "{arch}.expert_shared_feed_forward_length", file.rows("blk.0.ffn_gate_shexp.weight")
        ),
        "norm_topk_prob": False,
        "use_sliding_window": False,
    }
    width = whole_rotary_head_dim(file)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise CheckpointError("the heads of a qwen2moe GGUF do not share the hidden size", got=f"key_length {width}")
    return Translation(
        config=config,
        modules=MODULES,
        layer=LAYER,
        layer_modules={**ATTENTION_MODULES, **EXPERT_MODULES, **SHARED_EXPERT_MODULES},
        single_rows=frozenset({"ffn_gate_inp_shexp"}),
    )


def translate_qwen3moe(file: GGUFFile) -> Translation:
    """A router's chosen probabilities are made to sum to one, as llama.cpp makes them."""
    return Translation(
        config={
            **decoder_config(file),
            **_expert_config(file),
            "model_type": "qwen3_moe",
            "num_local_experts": file.integer("{arch}.expert_count"),
            "head_dim": whole_rotary_head_dim(file),
            "hidden_act": "silu",
            "rope_parameters": rope_parameters(file),
            "attention_bias": "blk.0.attn_q.bias" in file.tensor_names(),
            "norm_topk_prob": True,
            "use_sliding_window": False,
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules={**ATTENTION_MODULES, **EXPERT_MODULES, **HEAD_NORM_MODULES},
    )


def _expert_config(file: GGUFFile) -> dict[str, Any]:
    """Every layer has experts."""
    return {
        "num_experts_per_tok": file.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": file.integer(
            "{arch}.expert_feed_forward_length", file.rows("blk.0.ffn_gate_exps.weight")
        ),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
