"""Gemma 1."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import gemma_like, llama_like
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import MLPSpec, ModelSpec

# The released files say "gelu" and mean what the model was trained with.
GEMMA_ACTIVATIONS = {**ACTIVATIONS, "gelu": ACTIVATIONS["gelu_pytorch_tanh"]}


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Gemma config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    attention = gemma_like.read_attention(config, num_heads=16, num_kv_heads=16)
    mlp = MLPSpec(
        intermediate_size=config.integer("intermediate_size", 24576),
        activation=config.choice("hidden_act", GEMMA_ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    # transformers 5 no longer reads this older key.
    config.require("hidden_activation", (None, "gelu_pytorch_tanh"))
    norm = gemma_like.read_norm(config)
    attention = replace(attention, rope=read_rope(config, attention.head_dim))
    layer = llama_like.pre_norm_layer(attention, mlp, norm)
    return gemma_like.read_model(
        config,
        [layer] * config.integer("num_hidden_layers", 28),
        norm,
        vocab_size=256_000,
        hidden_size=3072,
        max_position_embeddings=8192,
    )


GEMMA = Family(model_type="gemma", spec=spec, names=gemma_like.with_default_targets(llama_like.NAMES))
