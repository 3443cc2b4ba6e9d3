"""Qwen 2, 2.5 and 3, dense."""

from __future__ import annotations

from graftlm.checkpoint.gguf_architectures.decoder_config import (
    decoder_config,
    rope_parameters,
    whole_rotary_head_dim,
)
from graftlm.checkpoint.gguf_architectures.llama import ATTENTION_MODULES, LAYER, MLP_MODULES, MODULES
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError


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
        layer_modules={
            **ATTENTION_MODULES,
            **MLP_MODULES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
    )
