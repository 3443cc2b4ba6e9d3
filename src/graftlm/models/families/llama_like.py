"""What the families that grew out of Llama share: the parts of their configs and the names of their modules.

A family's file reads the parts, changes what is its own, and puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import (
    AttentionSpec,
    ExpertRole,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NameMap,
    NormRole,
    NormSpec,
)

NAMES = NameMap(
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
        "gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        "down": ("model.layers.{}.mlp.down_proj",),
    },
    norms={
        "pre_attention": "model.layers.{}.input_layernorm",
        "pre_mlp": "model.layers.{}.post_attention_layernorm",
    },
    # Frequencies that files of 2023 carry; they follow from the config.
    ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
QUERY_KEY_NORMS: Mapping[NormRole, str] = {
    "query": "model.layers.{}.self_attn.q_norm",
    "key": "model.layers.{}.self_attn.k_norm",
}

# Of layers with experts.
EXPERT_PARAMETERS: Mapping[ExpertRole, str] = {
    "gate_up": "model.layers.{}.mlp.experts.gate_up_proj",
    "down": "model.layers.{}.mlp.experts.down_proj",
}
# How routers are trained.
ROUTER_TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")


def read_attention(
    config: ConfigReader,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_dim: int | None = None,
    rope_theta: float = 10_000.0,
    rope_types: Mapping[str, str] | None = None,
) -> AttentionSpec:
    """Attention over all tokens, with rotary positions.

    Args:
        head_dim: what counts when the config does not say; None for the hidden size over the number of heads.
        rope_theta: the same for theta.
        rope_types: what the family's old files call rope types.

    Raises:
        CheckpointError: a size is missing, or the heads do not divide the hidden size.
    """
    num_heads = config.integer("num_attention_heads")
    head_dim = _read_head_dim(config, head_dim)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        rope=read_rope(config, head_dim, default_theta=rope_theta, renamed_types=rope_types),
    )


def read_mlp(config: ConfigReader, *, bias: bool = False) -> MLPSpec:
    """A gated feed-forward layer."""
    return MLPSpec(
        intermediate_size=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        bias=bias,
    )


def pre_norm_layer(attention: AttentionSpec, mlp: MLPSpec | MoESpec, norm: NormSpec) -> LayerSpec:
    """Llama's layer: each branch reads its normed input."""
    return LayerSpec(attention=attention, mlp=mlp, norms={"pre_attention": norm, "pre_mlp": norm})


def read_model(
    config: ConfigReader,
    layers: Sequence[LayerSpec],
    norm: NormSpec,
    *,
    max_position_embeddings: int,
    tied_head: bool = False,
) -> ModelSpec:
    """The whole model, with `norm` at its end.

    Args:
        max_position_embeddings, tied_head: what counts when the config does not say.
    """
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position_embeddings=context_length(
            layers, config.integer("max_position_embeddings", max_position_embeddings)
        ),
        layers=tuple(layers),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", tied_head)),
    )


def _read_head_dim(config: ConfigReader, default: int | None) -> int:
    if default is None and config.get("head_dim") is None:
        return config.quotient("hidden_size", "num_attention_heads")
    return config.integer("head_dim", default)


def context_length(layers: Sequence[LayerSpec], max_position_embeddings: int) -> int:
    ropes = [layer.attention.rope for layer in layers if layer.attention.rope is not None]
    return min((rope.context_length(max_position_embeddings) for rope in ropes), default=max_position_embeddings)
