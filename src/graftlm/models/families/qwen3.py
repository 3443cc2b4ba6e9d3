"""Qwen3: Llama with a norm on each query and key head, and windows on the upper layers if switched on."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import LayerSpec, ModelSpec, NormSpec
from graftlm.models.windows import read_upper_windows


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Qwen3 config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    biased = config.flag("attention_bias")
    attention = llama_like.read_attention(config, qkv_bias=biased, output_bias=biased, head_dim=128)
    mlp = llama_like.read_mlp(config)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    head_norm = replace(norm, size=attention.head_dim)
    layers = [
        LayerSpec(
            attention=replace(attention, window=window),
            mlp=mlp,
            norms={"pre_attention": norm, "pre_mlp": norm, "query": head_norm, "key": head_norm},
        )
        for window in read_upper_windows(config, config.integer("num_hidden_layers"))
    ]
    return llama_like.read_model(config, layers, norm, max_position_embeddings=32768)


QWEN3 = Family(
    model_type="qwen3",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        norms={**llama_like.NAMES.norms, **llama_like.QUERY_KEY_NORMS},
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("q_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=("post_attention_layernorm",),
    ),
)
