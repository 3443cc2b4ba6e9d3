"""GPTBigCode: SantaCoder, StarCoder and everything saved as `model_type: gpt_bigcode`."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families.gpt2 import GPT2, UNUSED_KEYS
from graftlm.models.family import Family
from graftlm.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)

# Of the training code's own inference, which transformers has dropped.
OLD_INFERENCE_KEYS = (
    "inference_runner",
    "max_batch_size",
    "max_sequence_length",
    "pad_key_length",
    "pre_allocate_kv_cache",
    "validate_runner_input",
)


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a GPTBigCode config.

    With `multi_query` the fused projection is all query heads, one key, one value; without, each head's query, key and
    value in turn.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    # Where attention rounds in 16 bits; transformers' own attention looks at neither. multi_query alone decides how
    # many key-value heads there are.
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads")
    config.ignore(*UNUSED_KEYS, *OLD_INFERENCE_KEYS)
    config.require("add_cross_attention", (None, False))
    hidden_size = config.integer("n_embd")
    num_heads = config.integer("n_head")
    head_dim = config.quotient("n_embd", "n_head")
    is_multi_query = config.flag("multi_query", True)
    norm = NormSpec(kind="layer", bias=True, eps=config.number("layer_norm_epsilon", 1e-5))
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=1 if is_multi_query else num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
            qkv_bias=True,
            output_bias=True,
            head_order="concatenated" if is_multi_query else "grouped",
        ),
        mlp=MLPSpec(
            intermediate_size=config.integer("n_inner", 4 * hidden_size),
            activation=config.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh"),
            gated=False,
            bias=True,
        ),
        norms={"pre_attention": norm, "pre_mlp": norm},
    )
    num_positions = config.integer("n_positions", 1024)
    return ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=num_positions,
        layers=(layer,) * config.integer("n_layer"),
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", True)),
        embedding=EmbeddingSpec(num_positions=num_positions),
    )


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    spec=spec,
    # GPT-2's modules, but of plain linear layers; PEFT has no default for its norms.
    names=replace(
        GPT2.names,
        conv1d=frozenset(),
        ignored_tensors=(r"transformer\.(h\.\d+\.attn\.(masked_)?)?bias",),
        ln_tuning_targets=(),
    ),
)
