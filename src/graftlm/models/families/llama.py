"""Llama 1, 2, 3 and everything saved as `model_type: llama` (SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NameMap, RopeSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Llama config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.require("hidden_act", ("silu", None))
    config.require("quantization_config", (None,))
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            "config.json: num_attention_heads is not a multiple of num_key_value_heads",
            got=f"{num_heads}, {num_kv_heads}",
        )
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=config.flag("attention_bias"),
        output_bias=config.flag("attention_bias"),
    )
    mlp = MLPSpec(intermediate_size=config.integer("intermediate_size"), bias=config.flag("mlp_bias"))
    layer = LayerSpec(attention=attention, mlp=mlp)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, head_dim),
        layers=(layer,) * config.integer("num_hidden_layers"),
        tied_head=config.flag("tie_word_embeddings"),
    )


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    # v5 writes rope_parameters with theta inside; v4 wrote rope_scaling beside rope_theta, and "type" for "rope_type".
    top_level_theta = config.number("rope_theta", 10_000.0)
    settings = config.section("rope_parameters")
    if config.get("rope_scaling"):
        settings = config.section("rope_scaling")
    kind = settings.get("rope_type", settings.get("type", "default"))
    theta = settings.number("rope_theta", top_level_theta)
    if kind == "default":
        return RopeSpec(theta=theta, dims=head_dim)
    if kind == "linear":
        return RopeSpec(theta=theta, dims=head_dim, kind="linear", factor=settings.number("factor"))
    if kind == "frequency_factors":
        factors = tuple(float(factor) for factor in settings.get("factors"))
        return RopeSpec(theta=theta, dims=head_dim, kind="frequency_factors", frequency_factors=factors)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            dims=head_dim,
            kind="llama3",
            factor=settings.number("factor"),
            low_freq_factor=settings.number("low_freq_factor"),
            high_freq_factor=settings.number("high_freq_factor"),
            original_max_position_embeddings=settings.integer("original_max_position_embeddings"),
        )
    raise CheckpointError("config.json: this rope type is not supported", got=kind, allowed="default, linear, llama3")


LLAMA = Family(
    model_type="llama",
    spec=spec,
    names=NameMap(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="lm_head",
        layer={
            "pre_attention_norm": "model.layers.{}.input_layernorm",
            "q": "model.layers.{}.self_attn.q_proj",
            "k": "model.layers.{}.self_attn.k_proj",
            "v": "model.layers.{}.self_attn.v_proj",
            "output": "model.layers.{}.self_attn.o_proj",
            "pre_mlp_norm": "model.layers.{}.post_attention_layernorm",
            "gate": "model.layers.{}.mlp.gate_proj",
            "up": "model.layers.{}.mlp.up_proj",
            "down": "model.layers.{}.mlp.down_proj",
        },
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("k_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=("input_layernorm", "post_attention_layernorm", "norm"),
        ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
    ),
)
