"""Llama 1, 2, 3 and everything saved as `model_type: llama` (SmolLM2, TinyLlama, …)."""

from __future__ import annotations

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import AttentionSpec, HeadSpec, LayerSpec, MLPSpec, ModelSpec, NameMap, NormSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Llama config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=config.flag("attention_bias"),
            output_bias=config.flag("attention_bias"),
            rope=read_rope(config, head_dim),
        ),
        mlp=MLPSpec(
            intermediate_size=config.integer("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
            bias=config.flag("mlp_bias"),
        ),
        norms={"pre_attention": norm, "pre_mlp": norm},
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings")),
    )


LLAMA = Family(
    model_type="llama",
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
            "gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
            "down": ("model.layers.{}.mlp.down_proj",),
        },
        norms={
            "pre_attention": "model.layers.{}.input_layernorm",
            "pre_mlp": "model.layers.{}.post_attention_layernorm",
        },
        ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        default_targets=("q_proj", "v_proj"),
        ia3_targets=("k_proj", "v_proj", "down_proj"),
        ia3_feedforward=("down_proj",),
        ln_tuning_targets=("input_layernorm", "post_attention_layernorm", "norm"),
    ),
)
