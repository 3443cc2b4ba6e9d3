"""GPT-2, whose weights transformers stores transposed, and GPTBigCode (StarCoder), whose are not."""

from __future__ import annotations

from typing import Any

from graftlm.checkpoint.gguf_architectures.decoder_config import vocabulary_config
from graftlm.checkpoint.gguf_architectures.translation import Translation
from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError

MODULES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
LAYER = "transformer.h.{}"
LAYER_MODULES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def translate_gpt2(file: GGUFFile) -> Translation:
    return Translation(
        config={**_config(file), "model_type": "gpt2", "activation_function": "gelu_new"},
        modules=MODULES,
        layer=LAYER,
        layer_modules=LAYER_MODULES,
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    )


def translate_starcoder(file: GGUFFile) -> Translation:
    """
    Raises:
        CheckpointError: the file's keys claim one key-value head, its tensors hold more.
    """
    config = _config(file)
    qkv = "blk.0.attn_qkv.weight"
    if qkv in file.tensor_names():
        rows = config["n_embd"] + 2 * (config["n_embd"] // config["n_head"])
        if file.shape(qkv)[0] != rows:
            raise CheckpointError(
                "a starcoder GGUF with several key-value heads is not supported",
                got=f"{qkv} of {file.shape(qkv)[0]} rows",
                allowed=f"{rows} rows",
            )
    return Translation(
        config={
            **config,
            "model_type": "gpt_bigcode",
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": True,
        },
        modules=MODULES,
        layer=LAYER,
        layer_modules=LAYER_MODULES,
    )


def _config(file: GGUFFile) -> dict[str, Any]:
    return {
        **vocabulary_config(file),
        "n_positions": file.integer("{arch}.context_length"),
        "n_embd": file.integer("{arch}.embedding_length"),
        "n_layer": file.integer("{arch}.block_count"),
        "n_head": file.integer("{arch}.attention.head_count"),
        "n_inner": file.integer("{arch}.feed_forward_length"),
        "layer_norm_epsilon": file.number("{arch}.attention.layer_norm_epsilon"),
    }
