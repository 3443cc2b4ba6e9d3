"""Gemma 1, 2 and 3 (text). The files hold 1 + w for every norm."""

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

NORM_OFFSET = 1.0
FOUR_NORM_MODULES = {
    **ATTENTION_MODULES,
    **MLP_MODULES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# The largest model of each generation, told by its depth, scales by the mean head width and not by the head's own.
# Source: llama.cpp, src/models/gemma2.cpp and gemma3.cpp (LLM_TYPE_27B).
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62


def translate_gemma(file: GGUFFile) -> Translation:
    return Translation(
        config={
            **_config(file),
            "model_type": "gemma",
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": rope_parameters(file),
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules={**ATTENTION_MODULES, **MLP_MODULES},
        norm_offset=NORM_OFFSET,
    )


def translate_gemma2(file: GGUFFile) -> Translation:
    config = _config(file)
    return Translation(
        config={
            **config,
            "model_type": "gemma2",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": rope_parameters(file),
            "query_pre_attn_scalar": _query_scalar(config, GEMMA2_27B_LAYERS),
            "sliding_window": file.integer("{arch}.attention.sliding_window"),
            "layer_types": _layer_types(config["num_hidden_layers"], period=2),
            "attn_logit_softcapping": file.number("{arch}.attn_logit_softcapping"),
            "final_logit_softcapping": file.number("{arch}.final_logit_softcapping"),
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules=FOUR_NORM_MODULES,
        norm_offset=NORM_OFFSET,
    )


def translate_gemma3(file: GGUFFile) -> Translation:
    config = _config(file)
    window = file.field("{arch}.attention.sliding_window")
    period = 1 if window is None else file.integer("{arch}.attention.sliding_window_pattern", 6)
    final_softcap = file.field("{arch}.final_logit_softcapping")
    return Translation(
        config={
            **config,
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {
                "full_attention": rope_parameters(file),
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": file.number("{arch}.rope.freq_base_swa", 10_000.0),
                },
            },
            "query_pre_attn_scalar": _query_scalar(config, GEMMA3_27B_LAYERS),
            "sliding_window": window,
            "layer_types": _layer_types(config["num_hidden_layers"], period=period),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": final_softcap,
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules={
            **FOUR_NORM_MODULES,
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
        norm_offset=NORM_OFFSET,
    )


def _config(file: GGUFFile) -> dict[str, Any]:
    return {**decoder_config(file), "head_dim": whole_rotary_head_dim(file), "attention_bias": False}


def _query_scalar(config: dict[str, Any], largest_layers: int) -> int:
    if config["num_hidden_layers"] == largest_layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(num_layers: int, *, period: int) -> list[str]:
    """Every `period`-th layer sees everything."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
