"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused projections, which may turn part of a head and have a window."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ModelSpec, NormSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Phi-3 config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore("embd_pdrop", "resid_pdrop")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.require(key, (None, False))
    for key in ("full_attn_mod", "interpolate_factor"):
        config.require(key, (None, 1))
    attention = llama_like.read_attention(config, rope_types={"su": "longrope", "yarn": "longrope"})
    attention = replace(attention, window=config.integer_or_null("sliding_window", None))
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-5))
    layer = llama_like.pre_norm_layer(attention, llama_like.read_mlp(config), norm)
    layers = (layer,) * config.integer("num_hidden_layers")
    return llama_like.read_model(config, layers, norm, max_position_embeddings=4096)


PHI3 = Family(
    model_type="phi3",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        linears={
            **llama_like.NAMES.linears,
            "qkv": ("model.layers.{}.self_attn.qkv_proj",),
            "gate_up": ("model.layers.{}.mlp.gate_up_proj",),
        },
    ),
)
