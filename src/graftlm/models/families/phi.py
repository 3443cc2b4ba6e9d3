"""Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.family import Family
from graftlm.models.rope_config import read_rope
from graftlm.models.spec import AttentionSpec, HeadSpec, LayerSpec, MLPSpec, ModelSpec, NameMap, NormRole, NormSpec


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Phi config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore("embd_pdrop", "resid_pdrop")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.quotient("hidden_size", "num_attention_heads"))
    eps = config.number("layer_norm_eps", 1e-5)
    norm = NormSpec(kind="layer", eps=eps, bias=True)
    norms: dict[NormRole, NormSpec] = {"pre_attention": norm}
    if config.flag("qk_layernorm"):
        norms["query"] = norms["key"] = NormSpec(kind="layer", eps=eps, bias=True, size=head_dim)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            output_bias=True,
            rope=read_rope(config, head_dim, default_partial=0.5),
        ),
        mlp=MLPSpec(
            intermediate_size=config.integer("intermediate_size"),
            activation=config.choice("hidden_act", ACTIVATIONS, "gelu_new"),
            gated=False,
            bias=True,
        ),
        norms=norms,
        wiring="parallel",
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings"), bias=True),
    )


PHI = Family(
    model_type="phi",
    spec=spec,
    names=NameMap(
        embedding="model.embed_tokens",
        final_norm="model.final_layernorm",
        head="lm_head",
        linears={
            "qkv": (
                "model.layers.{}.self_attn.q_proj",
                "model.layers.{}.self_attn.k_proj",
                "model.layers.{}.self_attn.v_proj",
            ),
            "output": ("model.layers.{}.self_attn.dense",),
            "up": ("model.layers.{}.mlp.fc1",),
            "down": ("model.layers.{}.mlp.fc2",),
        },
        norms={
            "pre_attention": "model.layers.{}.input_layernorm",
            "query": "model.layers.{}.self_attn.q_layernorm",
            "key": "model.layers.{}.self_attn.k_layernorm",
        },
        ignored_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        default_targets=("q_proj", "v_proj", "fc1", "fc2"),
        ia3_targets=("q_proj", "v_proj", "fc2"),
        ia3_feedforward=("fc2",),
        ln_tuning_targets=("input_layernorm", "final_layernorm"),
    ),
)
