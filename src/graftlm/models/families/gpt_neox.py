"""GPT-NeoX, Pythia and everything saved as `model_type: gpt_neox`."""

from __future__ import annotations

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import AttentionSpec, HeadSpec, LayerSpec, MLPSpec, ModelSpec, NameMap, NormSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a GPT-NeoX config, in transformers' v4 spelling (rotary_pct, rotary_emb_base) or v5's.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore("classifier_dropout", "hidden_dropout")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.quotient("hidden_size", "num_attention_heads")
    bias = config.flag("attention_bias", True)
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps", 1e-5), bias=True)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            output_bias=bias,
            head_order="grouped",
            rope=read_rope(
                config,
                head_dim,
                default_theta=config.number("rotary_emb_base", 10_000.0),
                default_partial=config.number("rotary_pct", 0.25),
            ),
        ),
        mlp=MLPSpec(
            intermediate_size=config.integer("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
            gated=False,
            bias=True,
        ),
        norms={"pre_attention": norm, "pre_mlp": norm},
        wiring="parallel" if config.flag("use_parallel_residual", True) else "sequential",
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings")),
    )


GPT_NEOX = Family(
    model_type="gpt_neox",
    spec=spec,
    names=NameMap(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="lm_head",
        linears={
            "qkv": ("gpt_neox.layers.{}.attention.query_key_value",),
            "output": ("gpt_neox.layers.{}.attention.dense",),
            "up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
            "down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h",),
        },
        norms={
            "pre_attention": "gpt_neox.layers.{}.input_layernorm",
            "pre_mlp": "gpt_neox.layers.{}.post_attention_layernorm",
        },
        renames=((r"^embed_out\.", "lm_head."),),
        ignored_tensors=(
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)",
            r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
        ),
        default_targets=("query_key_value",),
        ia3_targets=("query_key_value", "dense_4h_to_h"),
        ia3_feedforward=("dense_4h_to_h",),
    ),
)
