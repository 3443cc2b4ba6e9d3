"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows on the upper layers if switched on."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ModelSpec, NormSpec
from graftlm.models.windows import read_upper_windows


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Qwen2 config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    attention = llama_like.read_attention(config, qkv_bias=True)
    mlp = llama_like.read_mlp(config)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    layers = [
        llama_like.pre_norm_layer(replace(attention, window=window), mlp, norm)
        for window in read_upper_windows(config, config.integer("num_hidden_layers"))
    ]
    return llama_like.read_model(config, layers, norm, max_position_embeddings=32768)


QWEN2 = Family(
    model_type="qwen2",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("q_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=("post_attention_layernorm",),
    ),
)
