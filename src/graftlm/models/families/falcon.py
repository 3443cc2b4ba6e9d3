"""Falcon: 7B (one KV head, one norm), 40B and 180B (groups of heads), RW (ALiBi, one branch after the other)."""

from __future__ import annotations

from dataclasses import replace

from graftlm.errors import CheckpointError
from graftlm.models.activations import ACTIVATIONS
from graftlm.models.alibi import alibi_slopes
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import (
    AlibiSpec,
    AttentionSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NameMap,
    NormRole,
    NormSpec,
)


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Falcon config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore("hidden_dropout", "multi_query")  # the latter is read where it counts
    width = config.spelling("n_embed", "hidden_size")
    hidden_size = config.integer(width)
    bias = config.flag("bias")
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = LayerSpec(
        attention=_attention(config, config.quotient(width, "num_attention_heads"), bias=bias),
        mlp=MLPSpec(
            intermediate_size=config.integer("ffn_hidden_size", 4 * hidden_size),
            activation=config.choice("activation", ACTIVATIONS, "gelu"),
            gated=False,
            bias=bias,
        ),
        norms=dict.fromkeys(_norm_roles(config), norm),
        wiring="parallel" if _is_parallel(config) else "sequential",
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
    )


def names(spec: ModelSpec) -> NameMap:
    """Two norms side by side are called otherwise than two norms one after the other."""
    layer = spec.layers[0]
    if layer.wiring == "parallel" and "pre_mlp" in layer.norms:
        return replace(NAMES, norms={"pre_attention": "transformer.h.{}.ln_attn", "pre_mlp": "transformer.h.{}.ln_mlp"})
    return NAMES


def _attention(config: ConfigReader, head_dim: int, *, bias: bool) -> AttentionSpec:
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_kv_heads", num_heads)
    if not config.flag("new_decoder_architecture"):
        if config.flag("multi_query", True):
            # Whatever num_kv_heads says: transformers saves the number of heads there.
            num_kv_heads = 1
        elif num_kv_heads != num_heads:
            raise CheckpointError(
                "config.json: num_kv_heads is not supported without multi_query and new_decoder_architecture",
                got=str(num_kv_heads),
                allowed=str(num_heads),
            )
    scale = head_dim**-0.5
    if config.flag("alibi"):
        # The bias is added before scores are scaled, and its products are rounded in any dtype.
        alibi = AlibiSpec(slopes=alibi_slopes(num_heads), factor=scale, dtype="bfloat16")
        config.ignore("rope_parameters", "rope_scaling", "rope_theta")
    else:
        alibi = None
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        qkv_bias=bias,
        output_bias=bias,
        head_order="grouped",
        rope=read_rope(config, head_dim) if alibi is None else None,
        alibi=alibi,
    )


def _is_parallel(config: ConfigReader) -> bool:
    if config.flag("new_decoder_architecture"):
        config.require("parallel_attn", (None, True))
    return config.flag("parallel_attn", True)


def _norm_roles(config: ConfigReader) -> tuple[NormRole, ...]:
    if not _is_parallel(config):
        config.ignore("num_ln_in_parallel_attn")
        return ("pre_attention", "pre_mlp")
    if not config.flag("new_decoder_architecture"):
        config.require("num_ln_in_parallel_attn", (None, 1))
        return ("pre_attention",)
    config.require("num_ln_in_parallel_attn", (None, 1, 2))
    return ("pre_attention",) if config.get("num_ln_in_parallel_attn") == 1 else ("pre_attention", "pre_mlp")


NAMES = NameMap(
    embedding="transformer.word_embeddings",
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
    ignored_tensors=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    default_targets=("query_key_value",),
    ia3_targets=("query_key_value", "dense_4h_to_h"),
    ia3_feedforward=("dense_4h_to_h",),
    ln_tuning_targets=("input_layernorm", "post_attention_layernorm", "ln_f"),
)
FALCON = Family(model_type="falcon", spec=spec, names=NAMES, names_by_spec=names)
