"""OLMo 2, which normalises what comes out of attention and MLP instead of what goes in."""

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

INPUT_NORMS = ("attn_norm", "ffn_norm")


def translate_olmo2(file: GGUFFile) -> Translation:
    """
    Raises:
        CheckpointError: OLMo 3, which has sliding windows, under the same architecture.
    """
    if (window := file.field("{arch}.attention.sliding_window")) is not None:
        raise CheckpointError(
            "an olmo2 GGUF with sliding windows (OLMo 3) is not supported", got=f"attention.sliding_window {window}"
        )
    config = {
        **decoder_config(file),
        "model_type": "olmo2",
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(file),
        "attention_bias": False,
    }
    width = whole_rotary_head_dim(file)
    if width * config["num_attention_heads"] != config["hidden_size"]:
        raise CheckpointError("the heads of an olmo2 GGUF do not share the hidden size", got=f"key_length {width}")
    modules = {**ATTENTION_MODULES, **MLP_MODULES}
    return Translation(
        config=config,
        modules=MODULES,
        layer=LAYER,
        layer_modules={
            **{source: target for source, target in modules.items() if source not in INPUT_NORMS},
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    )
