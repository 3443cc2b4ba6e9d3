"""Mixtral: Mistral with several experts in each layer, two of them for each token."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ExpertNames, ModelSpec, MoESpec, NormSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Mixtral config. A config without `sliding_window` has none.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore(*llama_like.ROUTER_TRAINING_KEYS)
    attention = llama_like.read_attention(config, rope_theta=1e6)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-5))
    attention = replace(attention, window=config.integer_or_null("sliding_window", None))
    moe = MoESpec(
        num_experts=config.integer(config.spelling("num_local_experts", "num_experts"), 8),
        experts_per_token=config.integer("num_experts_per_tok", 2),
        renormalise=True,
        expert=llama_like.read_mlp(config),
    )
    layers = (llama_like.pre_norm_layer(attention, moe, norm),) * config.integer("num_hidden_layers")
    return llama_like.read_model(config, layers, norm, max_position_embeddings=4096 * 32)


MIXTRAL = Family(
    model_type="mixtral",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        linears={**llama_like.NAMES.linears, "router": ("model.layers.{}.mlp.gate",)},
        experts=ExpertNames(
            parameters=llama_like.EXPERT_PARAMETERS,
            modules={
                "gate_up": (
                    "model.layers.{}.block_sparse_moe.experts.{}.w1",
                    "model.layers.{}.block_sparse_moe.experts.{}.w3",
                ),
                "down": ("model.layers.{}.block_sparse_moe.experts.{}.w2",),
            },
        ),
        renames=((r"\bblock_sparse_moe\.gate\b", "mlp.gate"),),
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("k_proj", "v_proj", "w2"),
        ia3_feedforward=("w2",),
    ),
)
