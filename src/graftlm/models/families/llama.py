"""Llama 1, 2, 3 and everything saved as `model_type: llama` (SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ModelSpec, NormSpec
from graftlm.models.windows import FULL


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Llama config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    num_layers = config.integer("num_hidden_layers")
    config.ignore("max_window_layers")  # left behind by conversions from Qwen
    config.require("layer_types", (None, [FULL] * num_layers))
    biased = config.flag("attention_bias")
    attention = llama_like.read_attention(config, qkv_bias=biased, output_bias=biased)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    layer = llama_like.pre_norm_layer(attention, llama_like.read_mlp(config, bias=config.flag("mlp_bias")), norm)
    layers = (layer,) * num_layers
    return llama_like.read_model(config, layers, norm, max_position_embeddings=2048)


LLAMA = Family(
    model_type="llama",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("k_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=("input_layernorm", "post_attention_layernorm", "norm"),
    ),
)
