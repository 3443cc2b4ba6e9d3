"""BLOOM, which has no rotary embedding, and GPT-NeoX (Pythia), which has one: both store q, k and v by head."""

from __future__ import annotations

from graftlm.checkpoint.gguf_architectures.decoder_config import rope_parameters, vocabulary_config
from graftlm.checkpoint.gguf_architectures.row_order import grouped_qkv
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile

NORM_AND_MLP_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def translate_bloom(file: GGUFFile) -> Translation:
    num_heads = file.integer("{arch}.attention.head_count")
    return Translation(
        config={
            **vocabulary_config(file),
            "model_type": "bloom",
            "hidden_size": file.integer("{arch}.embedding_length"),
            "n_layer": file.integer("{arch}.block_count"),
            "n_head": num_heads,
            "layer_norm_epsilon": file.number("{arch}.attention.layer_norm_epsilon"),
            "apply_residual_connection_post_layernorm": False,
        },
        modules={
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer="transformer.h.{}",
        layer_modules={
            **NORM_AND_MLP_MODULES,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        row_orders={"attn_qkv": grouped_qkv(num_heads, num_heads)},
    )


def translate_gptneox(file: GGUFFile) -> Translation:
    num_heads = file.integer("{arch}.attention.head_count")
    hidden_size = file.integer("{arch}.embedding_length")
    width = hidden_size // num_heads
    return Translation(
        config={
            **vocabulary_config(file),
            "model_type": "gpt_neox",
            "hidden_size": hidden_size,
            "intermediate_size": file.integer("{arch}.feed_forward_length"),
            "num_hidden_layers": file.integer("{arch}.block_count"),
            "num_attention_heads": num_heads,
            "hidden_act": "gelu",
            "layer_norm_eps": file.number("{arch}.attention.layer_norm_epsilon"),
            "max_position_embeddings": file.integer("{arch}.context_length"),
            "rope_parameters": {
                **rope_parameters(file),
                "partial_rotary_factor": file.integer("{arch}.rope.dimension_count", width) / width,
            },
            "use_parallel_residual": file.required("{arch}.use_parallel_residual"),
            "attention_bias": "blk.0.attn_qkv.bias" in file.tensor_names(),
        },
        modules={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layer="gpt_neox.layers.{}",
        layer_modules={
            **NORM_AND_MLP_MODULES,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        },
        row_orders={"attn_qkv": grouped_qkv(num_heads, num_heads)},
    )
