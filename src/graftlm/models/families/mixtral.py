"""Mixtral: Mistral with eight experts in each layer, two for each token."""

from __future__ import annotations

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import (
    AttentionSpec,
    ExpertNames,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NameMap,
    NormSpec,
)


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Mixtral config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        config.get(key)  # of training
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-5))
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=read_rope(config, head_dim, default_theta=1e6),
            window=None if config.get("sliding_window") is None else config.integer("sliding_window"),
        ),
        mlp=MoESpec(
            num_experts=config.integer("num_local_experts", 8),
            experts_per_token=config.integer("num_experts_per_tok", 2),
            renormalise=True,
            expert=MLPSpec(
                intermediate_size=config.integer("intermediate_size"),
                activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
            ),
        ),
        norms={"pre_attention": norm, "pre_mlp": norm},
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 4096 * 32),
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings")),
    )


MIXTRAL = Family(
    model_type="mixtral",
    spec=spec,
    names=NameMap(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="lm_head",
        linears={
            "qkv": (
                "model.layers.{}.self_attn.q_proj",
                "model.layers.{}.self_attn.k_proj",
                "model.layers.{}.self_attn.v_proj",
            ),
            "output": ("model.layers.{}.self_attn.o_proj",),
            "router": ("model.layers.{}.mlp.gate",),
        },
        experts=ExpertNames(
            parameters={
                "gate_up": "model.layers.{}.mlp.experts.gate_up_proj",
                "down": "model.layers.{}.mlp.experts.down_proj",
            },
            modules={
                "gate_up": (
                    "model.layers.{}.block_sparse_moe.experts.{}.w1",
                    "model.layers.{}.block_sparse_moe.experts.{}.w3",
                ),
                "down": ("model.layers.{}.block_sparse_moe.experts.{}.w2",),
            },
        ),
        norms={
            "pre_attention": "model.layers.{}.input_layernorm",
            "pre_mlp": "model.layers.{}.post_attention_layernorm",
        },
        renames=((r"\bblock_sparse_moe\.gate\b", "mlp.gate"),),
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("k_proj", "v_proj", "w2"),
        ia3_feedforward=("w2",),
    ),
)
