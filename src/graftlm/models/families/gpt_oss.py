"""GPT-OSS: attention with sinks and, in every second layer, a window; experts with biases and a clamped activation.

The experts are stacked on disk, as [in, out], or in MXFP4 (`quantization.mxfp4`).
"""

from __future__ import annotations

from dataclasses import replace

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import ClampedSwiGLU, ExpertNames, MLPSpec, ModelSpec, MoESpec, NormSpec
from graftlm.models.windows import read_windows


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a GPT-OSS config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise CheckpointError("config.json: rope_parameters is missing", allowed="as in the published files: yarn")
    # Said twice in the published files, or not what is computed: the activation is always the same.
    config.ignore("experts_per_token", "initial_context_length", "hidden_act", *llama_like.ROUTER_TRAINING_KEYS)
    num_layers = config.integer("num_hidden_layers")
    window = config.integer_or_null("sliding_window", 128)
    windows = read_windows(config, window, sliding=[index % 2 == 0 for index in range(num_layers)])
    biased = config.flag("attention_bias", True)
    attention = llama_like.read_attention(
        config, qkv_bias=biased, output_bias=biased, head_dim=64, rope_theta=150_000.0
    )
    attention = replace(attention, sinks=True)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-5), float32_product=True)
    moe = MoESpec(
        num_experts=config.integer(config.spelling("num_local_experts", "num_experts"), 128),
        experts_per_token=config.integer("num_experts_per_tok", 4),
        renormalise=True,
        router_bias=True,
        expert=MLPSpec(
            intermediate_size=config.integer("intermediate_size"),
            activation=ClampedSwiGLU(
                alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0)
            ),
            bias=True,
        ),
    )
    layers = [llama_like.pre_norm_layer(replace(attention, window=window), moe, norm) for window in windows]
    return llama_like.read_model(config, layers, norm, max_position_embeddings=131_072)


GPT_OSS = Family(
    model_type="gpt_oss",
    spec=spec,
    names=replace(
        llama_like.NAMES,
        linears={**llama_like.NAMES.linears, "router": ("model.layers.{}.mlp.router",)},
        parameters={"sinks": "model.layers.{}.self_attn.sinks"},
        experts=ExpertNames(parameters=llama_like.EXPERT_PARAMETERS, transposed=True),
    ),
)
