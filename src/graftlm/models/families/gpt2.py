"""GPT-2 and everything saved as `model_type: gpt2` (DistilGPT-2, DialoGPT, …)."""

from __future__ import annotations

from dataclasses import replace

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

# Of training, of heads for other tasks, and of old releases.
UNUSED_KEYS = (
    "attn_pdrop",
    "embd_pdrop",
    "n_ctx",
    "resid_pdrop",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
)


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a GPT-2 config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    # It changes where attention rounds in 16 bits, and scores are always summed up in float32 here.
    config.ignore("reorder_and_upcast_attn", *UNUSED_KEYS)
    config.require("add_cross_attention", (None, False))
    hidden_size = config.integer("n_embd")
    num_heads = config.integer("n_head")
    head_dim = config.quotient("n_embd", "n_head")
    norm = NormSpec(kind="layer", bias=True, eps=config.number("layer_norm_epsilon", 1e-5))
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        output_bias=True,
    )
    layer = LayerSpec(
        attention=attention,
        mlp=MLPSpec(
            intermediate_size=config.integer("n_inner", 4 * hidden_size),
            activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),
            gated=False,
            bias=True,
        ),
        norms={"pre_attention": norm, "pre_mlp": norm},
    )
    num_layers = config.integer("n_layer")
    layers = (layer,) * num_layers
    if config.flag("scale_attn_by_inverse_layer_idx"):
        scales = [attention.scale / number for number in range(1, num_layers + 1)]
        layers = tuple(replace(layer, attention=replace(attention, scale=scale)) for scale in scales)
    num_positions = config.integer("n_positions", 1024)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=num_positions,
        layers=layers,
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
        embedding=EmbeddingSpec(num_positions=num_positions),
    )


GPT2 = Family(
    model_type="gpt2",
    spec=spec,
    names=NameMap(
        embedding="transformer.wte",
        position_embedding="transformer.wpe",
        final_norm="transformer.ln_f",
        head="lm_head",
        linears={
            "qkv": ("transformer.h.{}.attn.c_attn",),
            "output": ("transformer.h.{}.attn.c_proj",),
            "up": ("transformer.h.{}.mlp.c_fc",),
            "down": ("transformer.h.{}.mlp.c_proj",),
        },
        norms={"pre_attention": "transformer.h.{}.ln_1", "pre_mlp": "transformer.h.{}.ln_2"},
        conv1d=frozenset({"qkv", "output", "up", "down"}),
        # The causal mask, and what masked scores were set to.
        ignored_tensors=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        default_targets=("c_attn",),
        ia3_targets=("c_attn", "mlp.c_proj"),
        ia3_feedforward=("mlp.c_proj",),
        ln_tuning_targets=("ln_1", "ln_2", "ln_f"),
    ),
)
