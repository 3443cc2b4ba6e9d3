"""Mistral 7B, Nemo and their like: Llama with one window on all layers, or none."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ModelSpec, NormSpec
from graftlm.models.windows import FULL, SLIDING


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Mistral config. A config without `sliding_window` has one of 4096; null is none.

    Raises:
        CheckpointError: a value Graft does not compute with, by name; windows on some layers only are another family's.
    """
    num_layers = config.integer("num_hidden_layers")
    window = config.integer_or_null("sliding_window", 4096)
    config.require("layer_types", (None, [FULL if window is None else SLIDING] * num_layers))
    attention = replace(llama_like.read_attention(config), window=window)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    layer = llama_like.pre_norm_layer(attention, llama_like.read_mlp(config), norm)
    return llama_like.read_model(config, (layer,) * num_layers, norm, max_position_embeddings=4096 * 32)


MISTRAL = Family(
    model_type="mistral",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("k_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=("input_layernorm", "post_attention_layernorm", "norm"),
    ),
)
