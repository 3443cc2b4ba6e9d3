"""Falcon with rotary positions: one key-value head and one norm (7B), or several and two (40B, 180B)."""

from __future__ import annotations

from graftlm.checkpoint.gguf_architectures.decoder_config import rope_parameters, vocabulary_config
from graftlm.checkpoint.gguf_architectures.row_order import grouped_qkv
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError

ONE_NORM = {"attn_norm": "input_layernorm"}
# llama.cpp's first norm is the one before the MLP here.
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}


def translate_falcon(file: GGUFFile) -> Translation:
    """
    Raises:
        CheckpointError: a layout whose config the file does not tell: Falcon-RW's, and several key-value heads under
            one norm (11B), whose rotary base llama.cpp's converter drops.
    """
    names = file.tensor_names()
    num_heads = file.integer("{arch}.attention.head_count")
    num_kv_heads = file.integer("{arch}.attention.head_count_kv", 1)
    two_norms = "blk.0.attn_norm_2.weight" in names
    if "blk.0.attn_qkv.bias" in names or (num_kv_heads > 1) != two_norms:
        raise CheckpointError(
            "this kind of falcon GGUF is not supported",
            got=f"{num_kv_heads} key-value heads, {'two norms' if two_norms else 'one norm'}"
            + (", biases" if "blk.0.attn_qkv.bias" in names else ""),
            allowed="one key-value head and one norm, or several and two; no biases",
        )
    return Translation(
        config={
            **vocabulary_config(file),
            "model_type": "falcon",
            "hidden_size": file.integer("{arch}.embedding_length"),
            "ffn_hidden_size": file.integer("{arch}.feed_forward_length"),
            "num_hidden_layers": file.integer("{arch}.block_count"),
            "num_attention_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "multi_query": True,
            "new_decoder_architecture": two_norms,
            "num_ln_in_parallel_attn": 2 if two_norms else 1,
            "parallel_attn": True,
            "alibi": False,
            "bias": False,
            "activation": "gelu",
            "layer_norm_epsilon": file.number("{arch}.attention.layer_norm_epsilon"),
            "max_position_embeddings": file.integer("{arch}.context_length"),
            "rope_parameters": rope_parameters(file),
        },
        modules={"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
        layer="transformer.h.{}",
        layer_modules={
            **(TWO_NORMS if two_norms else ONE_NORM),
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        row_orders={"attn_qkv": grouped_qkv(num_heads, num_kv_heads)},
    )
