"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B) and Qwen3-MoE: Qwen2 and Qwen3 with many small experts, in all layers or some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graftlm.errors import CheckpointError
from graftlm.models.activations import ACTIVATIONS
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import llama_like
from graftlm.models.family import Family
from graftlm.models.spec import (
    AttentionSpec,
    ExpertNames,
    LayerSpec,
    LinearRole,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NameMap,
    NormRole,
    NormSpec,
)
from graftlm.models.windows import read_windows


def qwen2_moe_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Qwen2-MoE config. When `use_sliding_window` is set, every second of the first `max_window_layers`
    layers has a window, unless `layer_types` says otherwise.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    num_layers = config.integer("num_hidden_layers")
    window = _read_window(config)
    end = config.integer("max_window_layers", 28)
    sliding = [window is not None and index % 2 == 0 and index < end for index in range(num_layers)]
    windows = read_windows(config, window, sliding=sliding)
    attention = llama_like.read_attention(config, qkv_bias=config.flag("qkv_bias", True))
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    shared = replace(
        llama_like.read_mlp(config), intermediate_size=config.integer("shared_expert_intermediate_size", 5632)
    )
    moe = replace(_read_moe(config, moe_intermediate_size=1408, experts_per_token=4, num_experts=60), shared=shared)
    return _model(config, attention, windows, moe, {"pre_attention": norm, "pre_mlp": norm}, norm)


def qwen3_moe_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Qwen3-MoE config. When `use_sliding_window` is set, all layers have a window.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    num_layers = config.integer("num_hidden_layers")
    config.ignore("max_window_layers")
    windows = (_read_window(config),) * num_layers
    biased = config.flag("attention_bias")
    attention = llama_like.read_attention(config, qkv_bias=biased, output_bias=biased)
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    head_norm = replace(norm, size=attention.head_dim)
    norms: dict[NormRole, NormSpec] = {
        "pre_attention": norm,
        "pre_mlp": norm,
        "query": head_norm,
        "key": head_norm,
    }
    moe = _read_moe(config, moe_intermediate_size=768, experts_per_token=8, num_experts=128)
    return _model(config, attention, windows, moe, norms, norm)


def _model(
    config: ConfigReader,
    attention: AttentionSpec,
    windows: tuple[int | None, ...],
    moe: MoESpec,
    norms: Mapping[NormRole, NormSpec],
    final_norm: NormSpec,
) -> ModelSpec:
    config.ignore(*llama_like.ROUTER_TRAINING_KEYS)
    mlp = llama_like.read_mlp(config)
    layers = [
        LayerSpec(attention=replace(attention, window=window), mlp=moe if is_sparse else mlp, norms=norms)
        for window, is_sparse in zip(windows, _sparse_layers(config, len(windows)), strict=True)
    ]
    return llama_like.read_model(config, layers, final_norm, max_position_embeddings=32768)


def _read_window(config: ConfigReader) -> int | None:
    """None unless it is switched on; transformers writes 0 for it then."""
    config.ignore("sliding_window")
    return config.integer_or_null("sliding_window", 4096) if config.flag("use_sliding_window") else None


def _read_moe(config: ConfigReader, *, moe_intermediate_size: int, experts_per_token: int, num_experts: int) -> MoESpec:
    """The numbers count where the config does not say."""
    return MoESpec(
        num_experts=config.integer(config.spelling("num_experts", "num_local_experts"), num_experts),
        experts_per_token=config.integer("num_experts_per_tok", experts_per_token),
        renormalise=config.flag("norm_topk_prob"),
        expert=MLPSpec(
            intermediate_size=config.integer("moe_intermediate_size", moe_intermediate_size),
            activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        ),
    )


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise CheckpointError("config.json: mlp_only_layers is not a list", got=repr(dense)[:100])
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


EXPERT_NAMES = ExpertNames(
    parameters=llama_like.EXPERT_PARAMETERS,
    modules={
        "gate_up": ("model.layers.{}.mlp.experts.{}.gate_proj", "model.layers.{}.mlp.experts.{}.up_proj"),
        "down": ("model.layers.{}.mlp.experts.{}.down_proj",),
    },
)
ROUTER: Mapping[LinearRole, tuple[str, ...]] = {"router": ("model.layers.{}.mlp.gate",)}
SHARED_EXPERT: Mapping[LinearRole, tuple[str, ...]] = {
    "shared_gate_up": (
        "model.layers.{}.mlp.shared_expert.gate_proj",
        "model.layers.{}.mlp.shared_expert.up_proj",
    ),
    "shared_down": ("model.layers.{}.mlp.shared_expert.down_proj",),
    "shared_expert_gate": ("model.layers.{}.mlp.shared_expert_gate",),
}
NAMES: NameMap = replace(llama_like.NAMES, experts=EXPERT_NAMES)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    spec=qwen2_moe_spec,
    names=replace(NAMES, linears={**NAMES.linears, **ROUTER, **SHARED_EXPERT}),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    spec=qwen3_moe_spec,
    names=replace(
        NAMES,
        linears={**NAMES.linears, **ROUTER},
        norms={**NAMES.norms, **llama_like.QUERY_KEY_NORMS},
    ),
)
