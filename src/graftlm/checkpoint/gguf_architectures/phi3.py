"""Phi-3, Phi-3.5 and Phi-4 (dense)."""

from __future__ import annotations

from typing import Any

from graftlm.checkpoint.gguf_architectures.decoder_config import decoder_config, head_dim
from graftlm.checkpoint.gguf_architectures.llama import LAYER, MODULES
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def translate_phi3(file: GGUFFile) -> Translation:
    context = file.integer("{arch}.context_length")
    original_context = file.integer("{arch}.rope.scaling.original_context_length", context)
    return Translation(
        config={
            **decoder_config(file),
            "model_type": "phi3",
            "hidden_act": "silu",
            "rope_parameters": _rope_parameters(file, original_context),
            "original_max_position_embeddings": original_context,
            # 0 in the file is "none" (Phi-4).
            "sliding_window": file.field("{arch}.attention.sliding_window") or None,
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        in_config=frozenset({LONG_FACTORS, SHORT_FACTORS}),
    )


def _rope_parameters(file: GGUFFile, original_context: int) -> dict[str, Any]:
    width = head_dim(file)
    parameters = {
        "rope_type": "default",
        "rope_theta": file.number("{arch}.rope.freq_base", 10_000.0),
        "partial_rotary_factor": file.integer("{arch}.rope.dimension_count", width) / width,
    }
    if LONG_FACTORS not in file.tensor_names():
        return parameters
    return {
        **parameters,
        "rope_type": "longrope",
        "long_factor": file.read(LONG_FACTORS).tolist(),
        "short_factor": file.read(SHORT_FACTORS).tolist(),
        "original_max_position_embeddings": original_context,
    }
