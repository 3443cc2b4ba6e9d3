"""What the generations of Gemma share: the parts of their configs and the names of their modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.spec import (
    Activation,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NameMap,
    NormRole,
    NormSpec,
)

FOUR_NORMS: dict[NormRole, str] = {
    "pre_attention": "model.layers.{}.input_layernorm",
    "post_attention": "model.layers.{}.post_attention_layernorm",
    "pre_mlp": "model.layers.{}.pre_feedforward_layernorm",
    "post_mlp": "model.layers.{}.post_feedforward_layernorm",
}
FOUR_NORM_NAMES = replace(llama_like.NAMES, norms=FOUR_NORMS, ignored_tensors=())


def with_default_targets(names: NameMap) -> NameMap:
    """With the defaults PEFT has for Gemma 1, 2 and 3."""
    norms = (path.removeprefix("model.layers.{}.") for role, path in names.norms.items() if role in FOUR_NORMS)
    return replace(
        names,
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("q_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=(*norms, "norm"),
    )


def inside(names: NameMap, path: str) -> NameMap:
    """The same modules where `path` holds what "model" holds otherwise; the head stays outside."""

    def moved(module: str) -> str:
        return module.replace("model.", f"{path}.", 1)

    inputs, experts = names.layer_inputs, names.experts
    return replace(
        names,
        embedding=moved(names.embedding),
        final_norm=None if names.final_norm is None else moved(names.final_norm),
        linears={role: tuple(moved(module) for module in modules) for role, modules in names.linears.items()},
        norms={role: moved(module) for role, module in names.norms.items()},
        layer_inputs=None
        if inputs is None
        else replace(inputs, table=moved(inputs.table), projection=moved(inputs.projection), norm=moved(inputs.norm)),
        parameters={role: moved(parameter) for role, parameter in names.parameters.items()},
        experts=None
        if experts is None
        else replace(experts, parameters={role: moved(name) for role, name in experts.parameters.items()}),
    )


def read_norm(config: ConfigReader) -> NormSpec:
    """Weights are stored less one, and applied before rounding."""
    return NormSpec(eps=config.number("rms_norm_eps", 1e-6), offset=1.0, float32_product=True)


def read_attention(
    config: ConfigReader,
    *,
    num_heads: int,
    num_kv_heads: int,
    directions: tuple[str | bool | None, ...] = (None, False),
) -> AttentionSpec:
    """Heads, with 1/sqrt(head_dim) for a scale and no positions yet.

    Args:
        num_heads, num_kv_heads: how many a config that does not say has.
        directions: values of `use_bidirectional_attention` under which no token of a text sees a later one; encoders
            made of Gemma have others.
    """
    config.require("use_bidirectional_attention", directions)
    head_dim = config.integer("head_dim", 256)
    biased = config.flag("attention_bias")
    return AttentionSpec(
        num_heads=config.integer("num_attention_heads", num_heads),
        num_kv_heads=config.integer("num_key_value_heads", num_kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=biased,
        output_bias=biased,
    )


def read_query_scale(config: ConfigReader) -> float:
    """From Gemma 2 on the scale has a number of its own."""
    return float(config.number("query_pre_attn_scalar", 256) ** -0.5)


def read_mlp(config: ConfigReader) -> MLPSpec:
    """The feed-forward layer from Gemma 2 on."""
    # transformers reads the newer key alone.
    config.require("hidden_act", (None, "gelu", "gelu_pytorch_tanh"))
    return MLPSpec(
        intermediate_size=config.integer("intermediate_size", 9216),
        activation=read_activation(config),
    )


def read_activation(config: ConfigReader) -> Activation:
    """The one activation from Gemma 2 on."""
    return config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")


def read_model(
    config: ConfigReader,
    layers: Sequence[LayerSpec],
    norm: NormSpec,
    *,
    vocab_size: int,
    hidden_size: int,
    max_position_embeddings: int,
    softcap: float | None = None,
) -> ModelSpec:
    """The whole model, with `norm` at its end and logits capped.

    Args:
        vocab_size, hidden_size, max_position_embeddings: what counts when the config does not say.
    """
    hidden_size = config.integer("hidden_size", hidden_size)
    return ModelSpec(
        vocab_size=config.integer("vocab_size", vocab_size),
        hidden_size=hidden_size,
        max_position_embeddings=llama_like.context_length(
            layers, config.integer("max_position_embeddings", max_position_embeddings)
        ),
        layers=tuple(layers),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True), softcap=softcap),
        embedding=EmbeddingSpec(scale=hidden_size**0.5),
    )
