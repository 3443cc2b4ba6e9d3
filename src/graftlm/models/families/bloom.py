"""BLOOM and BLOOMZ."""

from __future__ import annotations

from graftlm.errors import CheckpointError
from graftlm.models.alibi import alibi_slopes
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.spec import (
    AlibiSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NameMap,
    NormSpec,
)

# Dropout, and settings of the training framework that old files still carry.
UNUSED_KEYS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "hidden_dropout",
    "masked_softmax_fusion",
    "n_inner",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "unk_token_id",
)


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a BLOOM config, in transformers' spelling or the hub's older one (n_embed, seq_length).

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    width, heads = config.spelling("n_embed", "hidden_size"), config.spelling("n_head", "num_attention_heads")
    hidden_size, num_heads = config.integer(width), config.integer(heads)
    head_dim = config.quotient(width, heads)
    if config.flag("slow_but_exact") and config.integer("pretraining_tp", 1) > 1:
        # transformers then sums slices of two projections, and leaves out their biases and their adapters.
        raise CheckpointError("config.json: slow_but_exact is not supported with pretraining_tp > 1", got="true")
    config.ignore(*UNUSED_KEYS)
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            output_bias=True,
            head_order="grouped",
            alibi=AlibiSpec(slopes=alibi_slopes(num_heads)),
        ),
        mlp=MLPSpec(intermediate_size=4 * hidden_size, activation="gelu_tanh", gated=False, bias=True),
        norms={"pre_attention": norm, "pre_mlp": norm},
        wiring="sequential_normed_residual"
        if config.flag("apply_residual_connection_post_layernorm")
        else "sequential",
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        # ALiBi has no end; this is the length the models were trained with.
        max_position_embeddings=config.integer("seq_length", 2048),
        layers=(layer,) * config.integer(config.spelling("n_layer", "num_hidden_layers")),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
        embedding=EmbeddingSpec(norm=norm),
    )


BLOOM = Family(
    model_type="bloom",
    spec=spec,
    names=NameMap(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        final_norm="transformer.ln_f",
        head="lm_head",
        linears={
            "qkv": ("transformer.h.{}.self_attention.query_key_value",),
            "output": ("transformer.h.{}.self_attention.dense",),
            "up": ("transformer.h.{}.mlp.dense_h_to_4h",),
            "down": ("transformer.h.{}.mlp.dense_4h_to_h",),
        },
        norms={
            "pre_attention": "transformer.h.{}.input_layernorm",
            "pre_mlp": "transformer.h.{}.post_attention_layernorm",
        },
        default_targets=("query_key_value",),
        ia3_targets=("query_key_value", "mlp.dense_4h_to_h"),
        ia3_feedforward=("mlp.dense_4h_to_h",),
        ln_tuning_targets=("input_layernorm", "post_attention_layernorm", "ln_f"),
    ),
)
