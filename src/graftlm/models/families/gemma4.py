"""Gemma 4: layers of two kinds and sizes, inputs for each layer, keys and values that layers lend each other, experts
beside the feed-forward layer.

By itself, or beside towers for images and sounds, which are left unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import gemma_like, llama_like
from graftlm.models.family import Family
from graftlm.models.rope_config import proportional_rope, rope_of
from graftlm.models.rope_spec import RopeSpec
from graftlm.models.spec import (
    AttentionSpec,
    ExpertNames,
    LayerInputNames,
    LayerInputSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NameMap,
    NormRole,
    NormSpec,
)
from graftlm.models.windows import FULL, SLIDING, read_windows

EXPERT_NORMS: dict[NormRole, str] = {
    "pre_dense": gemma_like.FOUR_NORMS["pre_mlp"],
    "post_dense": "model.layers.{}.post_feedforward_layernorm_1",
    "pre_experts": "model.layers.{}.pre_feedforward_layernorm_2",
    "post_experts": "model.layers.{}.post_feedforward_layernorm_2",
}


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Gemma 4 text config.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6), float32_product=True)
    mlp = gemma_like.read_mlp(config)
    wide = replace(mlp, intermediate_size=mlp.intermediate_size * 2) if config.flag("use_double_wide_mlp") else mlp
    layers = [
        _layer(attention, mlp if attention.kv_layer is None else wide, norm)
        for attention in _lend(_read_attentions(config), _count(config, "num_kv_shared_layers"))
    ]
    model = gemma_like.read_model(
        config,
        layers,
        norm,
        vocab_size=262_144,
        hidden_size=2304,
        max_position_embeddings=131_072,
        softcap=config.number_or_null("final_logit_softcapping", None),
    )
    return _with_layer_inputs(config, _with_experts(config, model, norm), norm)


def multimodal_spec(config: ConfigReader) -> ModelSpec:
    """The spec of the text part of a Gemma 4 config that holds it as its `text_config`.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore("vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id")
    config.ignore("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
    config.ignore("vision_soft_tokens_per_image")
    text = spec(config.section("text_config"))
    return replace(text, head=replace(text.head, tied=config.flag("tie_word_embeddings", True)))


def _read_attentions(config: ConfigReader) -> list[AttentionSpec]:
    """Of all layers, each with keys and values of its own."""
    # Under "vision" only the tokens of an image see later ones.
    attention = gemma_like.read_attention(config, num_heads=8, num_kv_heads=4, directions=(None, False, "vision"))
    attention = replace(attention, scale=1.0)
    windows = _read_windows(config)
    full_head_dim = config.integer("global_head_dim", 512)
    full_kv_heads = config.integer_or_null("num_global_key_value_heads", None)
    keys_as_values = config.flag("attention_k_eq_v")
    stated = config.get("per_layer_config") is not None
    attentions = []
    for index, window in enumerate(windows):
        full = attention
        if window is None and not stated:
            kv_heads = full_kv_heads if keys_as_values and full_kv_heads is not None else attention.num_kv_heads
            full = replace(attention, head_dim=full_head_dim, num_kv_heads=kv_heads)
        own = config.section("per_layer_config").section(str(index))
        sized = replace(
            full,
            head_dim=own.integer("head_dim", full.head_dim),
            num_kv_heads=own.integer("num_key_value_heads", full.num_kv_heads),
        )
        attentions.append(
            replace(
                sized,
                window=window,
                rope=_read_rope(config, sized.head_dim, window),
                head_order="keys_as_values" if keys_as_values and window is None else "concatenated",
            )
        )
    return attentions


def _read_windows(config: ConfigReader) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers", 30)
    window = config.integer("sliding_window", 512)
    windows = read_windows(config, window, sliding=[(index + 1) % 6 != 0 for index in range(num_layers)])
    # Whatever the list says.
    return (*windows[:-1], None)


def _read_rope(config: ConfigReader, head_dim: int, window: int | None) -> RopeSpec:
    parameters = config.section("rope_parameters")
    settings = parameters.section(FULL if window is None else SLIDING)
    if window is None and settings.get("rope_type", "proportional") == "proportional":
        share = 0.25 if config.get("rope_parameters") is None else 1.0
        return proportional_rope(settings, head_dim, theta=1e6, share=share)
    settings.require("partial_rotary_factor", (None, 1.0))
    return rope_of(config, settings, head_dim, theta=1e6 if window is None else 1e4)


def _lend(attentions: Sequence[AttentionSpec], num_borrowers: int) -> list[AttentionSpec]:
    """The last layers read keys and values of the last layer before them that sees equally far."""
    first = len(attentions) - num_borrowers
    lenders = {attention.window: index for index, attention in enumerate(attentions[: max(first, 0)])}
    if any(attention.window not in lenders for attention in attentions[max(first, 0) :]):
        raise CheckpointError(
            "config.json: num_kv_shared_layers leaves a kind of layer without one that has keys and values",
            got=num_borrowers,
        )
    return [
        attention if index < first else replace(attention, kv_layer=lenders[attention.window])
        for index, attention in enumerate(attentions)
    ]


def _layer(attention: AttentionSpec, mlp: MLPSpec, norm: NormSpec) -> LayerSpec:
    head_norm = replace(norm, size=attention.head_dim)
    norms = {**dict.fromkeys(gemma_like.FOUR_NORMS, norm), "query": head_norm}
    if attention.kv_layer is None:
        norms |= {"key": head_norm, "value": replace(head_norm, weight=False)}
    return LayerSpec(attention=attention, mlp=mlp, norms=norms, scaled=True)


def _with_experts(config: ConfigReader, model: ModelSpec, norm: NormSpec) -> ModelSpec:
    """The norm before the dense layer is its own then: the router reads the hidden state itself."""
    config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    if not config.flag("enable_moe_block"):
        return model
    moe = MoESpec(
        num_experts=config.integer("num_experts"),
        experts_per_token=config.integer("top_k_experts"),
        renormalise=True,
        router_factor=model.hidden_size**-0.5,
        expert_scaled=True,
        expert=replace(gemma_like.read_mlp(config), intermediate_size=config.integer("moe_intermediate_size")),
    )
    own = {**dict.fromkeys(EXPERT_NORMS, norm), "router": replace(norm, weight=False)}
    layers = []
    for layer in model.layers:
        kept: dict[NormRole, NormSpec] = {role: of for role, of in layer.norms.items() if role != "pre_mlp"}
        layers.append(replace(layer, experts=moe, norms={**kept, **own}))
    return replace(model, layers=tuple(layers))


def _with_layer_inputs(config: ConfigReader, model: ModelSpec, norm: NormSpec) -> ModelSpec:
    size = _count(config, "hidden_size_per_layer_input", 256)
    vocab_size = config.integer("vocab_size_per_layer_input", 262_144)
    if size == 0:
        return model
    if vocab_size != model.vocab_size:
        raise CheckpointError(
            "config.json: vocab_size_per_layer_input is not vocab_size", got=vocab_size, allowed=str(model.vocab_size)
        )
    activation = gemma_like.read_activation(config)
    return replace(
        model,
        layers=tuple(replace(layer, norms={**layer.norms, "post_layer_input": norm}) for layer in model.layers),
        layer_inputs=LayerInputSpec(size=size, norm=replace(norm, size=size), activation=activation),
    )


def _count(config: ConfigReader, key: str, default: int = 0) -> int:
    """A positive integer, or zero."""
    return 0 if config.get(key, default) == 0 else config.integer(key, default)


TEXT_NAMES = replace(
    gemma_like.FOUR_NORM_NAMES,
    linears={
        **gemma_like.FOUR_NORM_NAMES.linears,
        "layer_input_gate": ("model.layers.{}.per_layer_input_gate",),
        "layer_input_up": ("model.layers.{}.per_layer_projection",),
        "router": ("model.layers.{}.router.proj",),
    },
    norms={
        **gemma_like.FOUR_NORM_NAMES.norms,
        **llama_like.QUERY_KEY_NORMS,
        "value": "model.layers.{}.self_attn.v_norm",
        "post_layer_input": "model.layers.{}.post_per_layer_input_norm",
        "router": "model.layers.{}.router.norm",
        **EXPERT_NORMS,
    },
    parameters={
        "layer_scalar": "model.layers.{}.layer_scalar",
        "router_scale": "model.layers.{}.router.scale",
        "expert_scale": "model.layers.{}.router.per_expert_scale",
    },
    experts=ExpertNames(
        parameters={
            "gate_up": "model.layers.{}.experts.gate_up_proj",
            "down": "model.layers.{}.experts.down_proj",
        },
        linear_router=True,
    ),
    layer_inputs=LayerInputNames(
        table="model.embed_tokens_per_layer",
        projection="model.per_layer_model_projection",
        norm="model.per_layer_projection_norm",
    ),
)
NAMES = replace(
    gemma_like.inside(TEXT_NAMES, "model.language_model"),
    unused_modules=(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)",),
    default_targets=("q_proj", "v_proj"),
)


def _without_borrowed(names: NameMap, model: ModelSpec) -> NameMap:
    """Files have projections and norms for keys and values that a layer borrows; nobody reads them."""
    layers = [index for index, layer in enumerate(model.layers) if layer.attention.kv_layer is not None]
    if not layers:
        return names
    base = names.embedding.removesuffix("embed_tokens").replace(".", r"\.")
    indices = "|".join(str(index) for index in layers)
    return replace(
        names, ignored_tensors=(rf"{base}layers\.({indices})\.self_attn\.([kv]_proj|[kv]_norm)\.(weight|bias)",)
    )


GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    spec=spec,
    names=TEXT_NAMES,
    names_by_spec=lambda model: _without_borrowed(TEXT_NAMES, model),
)
GEMMA4 = Family(
    model_type="gemma4",
    spec=multimodal_spec,
    names=NAMES,
    names_by_spec=lambda model: _without_borrowed(NAMES, model),
)
