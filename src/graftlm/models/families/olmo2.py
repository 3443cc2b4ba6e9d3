"""OLMo-2: Llama with norms after the branches instead of before, and over whole queries and keys."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import LayerSpec, ModelSpec, NormSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of an OLMo-2 config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    biased = config.flag("attention_bias")
    attention = llama_like.read_attention(config, qkv_bias=biased, output_bias=biased)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-5), float32_product=True)
    layer = LayerSpec(
        attention=attention,
        mlp=llama_like.read_mlp(config),
        norms={
            "post_attention": norm,
            "post_mlp": norm,
            "query": replace(norm, size=attention.num_heads * attention.head_dim),
            "key": replace(norm, size=attention.num_kv_heads * attention.head_dim),
        },
    )
    layers = (layer,) * config.integer("num_hidden_layers")
    return llama_like.read_model(config, layers, norm, max_position_embeddings=2048)


OLMO2 = Family(
    model_type="olmo2",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        norms={
            "post_attention": "model.layers.{}.post_attention_layernorm",
            "post_mlp": "model.layers.{}.post_feedforward_layernorm",
            **llama_like.QUERY_KEY_NORMS,
        },
    ),
)
