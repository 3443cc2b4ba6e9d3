"""Llama and Mistral, which share an architecture, and Mixtral, which is the same with experts."""

from __future__ import annotations

from graftlm.checkpoint.gguf_architectures.decoder_config import (
    ROPE_FACTORS,
    decoder_config,
    rope_parameters,
    whole_rotary_head_dim,
)
from graftlm.checkpoint.gguf_architectures.row_order import rotary_halves
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile

MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = "model.layers.{}"
ATTENTION_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP_MODULES = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_MODULES = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
}


def translate_llama(file: GGUFFile) -> Translation:
    config = {
        **decoder_config(file),
        "model_type": "llama",
        "head_dim": whole_rotary_head_dim(file),
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(file),
    }
    mlp_modules = MLP_MODULES
    if file.field("{arch}.expert_count"):
        config["model_type"] = "mixtral"
        config["num_local_experts"] = file.integer("{arch}.expert_count")
        config["num_experts_per_tok"] = file.integer("{arch}.expert_used_count")
        config["sliding_window"] = None
        mlp_modules = EXPERT_MODULES
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensor_names()
    return Translation(
        config=config,
        modules=MODULES,
        layer=LAYER,
        layer_modules={**ATTENTION_MODULES, **mlp_modules},
        row_orders={
            "attn_q": rotary_halves(config["num_attention_heads"]),
            "attn_k": rotary_halves(config["num_key_value_heads"]),
        },
        in_config=frozenset({ROPE_FACTORS}),
    )
