"""OPT, the 350m model with its norms after the residuals and its narrow embedding included."""

from __future__ import annotations

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NameMap,
    NormSpec,
)

# Rows of the position table before that of position 0.
POSITION_OFFSET = 2
# Of training, and of old releases.
UNUSED_KEYS = ("activation_dropout", "dropout", "init_std", "layerdrop", "output_projection", "prefix")


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of an OPT config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore(*UNUSED_KEYS)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.quotient("hidden_size", "num_attention_heads")
    embedding_size = config.integer("word_embed_proj_dim", hidden_size)
    has_bias = config.flag("enable_bias", True)
    is_affine = config.flag("layer_norm_elementwise_affine", True)
    is_pre_norm = config.flag("do_layer_norm_before", True)
    norm = NormSpec(kind="layer", eps=1e-5, weight=is_affine, bias=is_affine)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=has_bias,
            output_bias=has_bias,
        ),
        mlp=MLPSpec(
            intermediate_size=config.integer("ffn_dim"),
            activation=config.choice("activation_function", ACTIVATIONS, "relu"),
            gated=False,
            bias=has_bias,
        ),
        norms={"pre_attention": norm, "pre_mlp": norm} if is_pre_norm else {"post_attention": norm, "post_mlp": norm},
        wiring="sequential" if is_pre_norm else "post_norm",
    )
    # Checkpoints tuned with an early release go without.
    has_final_norm = is_pre_norm and not config.flag("_remove_final_layer_norm")
    num_positions = config.integer("max_position_embeddings", 2048)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=num_positions,
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm if has_final_norm else None,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
        embedding=EmbeddingSpec(
            size=None if embedding_size == hidden_size else embedding_size,
            num_positions=num_positions,
            position_offset=POSITION_OFFSET,
        ),
    )


OPT = Family(
    model_type="opt",
    spec=spec,
    names=NameMap(
        embedding="model.decoder.embed_tokens",
        position_embedding="model.decoder.embed_positions",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
        final_norm="model.decoder.final_layer_norm",
        head="lm_head",
        linears={
            "qkv": (
                "model.decoder.layers.{}.self_attn.q_proj",
                "model.decoder.layers.{}.self_attn.k_proj",
                "model.decoder.layers.{}.self_attn.v_proj",
            ),
            "output": ("model.decoder.layers.{}.self_attn.out_proj",),
            "up": ("model.decoder.layers.{}.fc1",),
            "down": ("model.decoder.layers.{}.fc2",),
        },
        norms={
            "pre_attention": "model.decoder.layers.{}.self_attn_layer_norm",
            "post_attention": "model.decoder.layers.{}.self_attn_layer_norm",
            "pre_mlp": "model.decoder.layers.{}.final_layer_norm",
            "post_mlp": "model.decoder.layers.{}.final_layer_norm",
        },
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("q_proj", "k_proj", "fc2"),
        ia3_feedforward=("fc2",),
    ),
)
