"""Gemma 3, by itself or beside a vision tower, which is left unread."""

from __future__ import annotations

from dataclasses import replace

from graftlm.models.config_reader import ConfigReader
from graftlm.models.families import gemma_like, llama_like
from graftlm.models.family import Family
from graftlm.models.rope_config import rope_of
from graftlm.models.rope_spec import RopeSpec
from graftlm.models.spec import LayerSpec, ModelSpec
from graftlm.models.windows import FULL, SLIDING, read_windows


def spec(config: ConfigReader) -> ModelSpec:
    """The spec of a Gemma 3 text config, in transformers' v4 or v5 spelling.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    attention = gemma_like.read_attention(config, num_heads=8, num_kv_heads=4)
    attention = replace(attention, scale=gemma_like.read_query_scale(config))
    # transformers has the key and caps nothing.
    config.require("attn_logit_softcapping", (None,))
    mlp = gemma_like.read_mlp(config)
    norm = gemma_like.read_norm(config)
    head_norm = replace(norm, size=attention.head_dim)
    norms = {**dict.fromkeys(gemma_like.FOUR_NORMS, norm), "query": head_norm, "key": head_norm}
    full_rope, sliding_rope = _read_ropes(config, attention.head_dim)
    layers = [
        LayerSpec(
            attention=replace(attention, window=window, rope=full_rope if window is None else sliding_rope),
            mlp=mlp,
            norms=norms,
        )
        for window in _read_windows(config)
    ]
    return gemma_like.read_model(
        config,
        layers,
        norm,
        vocab_size=262_208,
        hidden_size=2304,
        max_position_embeddings=131_072,
        softcap=config.number_or_null("final_logit_softcapping", None),
    )


def _read_windows(config: ConfigReader) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers", 26)
    window = config.integer_or_null("sliding_window", 4096)
    period = config.integer("sliding_window_pattern", 6)
    config.ignore("_sliding_window_pattern", "cache_implementation")
    return read_windows(config, window, sliding=[(index + 1) % period != 0 for index in range(num_layers)])


def _read_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of full and of sliding layers. transformers 4 wrote a theta for either and one scaling, of the full ones."""
    parameters = config.section("rope_parameters")
    full = config.section("rope_scaling") if config.get("rope_scaling") else parameters.section(FULL)
    sliding = parameters.section(SLIDING)
    for settings in (full, sliding):
        settings.require("partial_rotary_factor", (None, 1.0))
    return (
        rope_of(config, full, head_dim, theta=config.number("rope_theta", 1e6)),
        rope_of(config, sliding, head_dim, theta=config.number("rope_local_base_freq", 1e4)),
    )


def multimodal_spec(config: ConfigReader) -> ModelSpec:
    """The spec of the text part of a Gemma 3 config that holds it as its `text_config`.

    Raises:
        CheckpointError: a value Graft does not compute with, by name.
    """
    config.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    text = spec(config.section("text_config"))
    # The outer flag alone decides, as in transformers: the head belongs to the whole.
    return replace(text, head=replace(text.head, tied=config.flag("tie_word_embeddings", True)))


NAMES = replace(gemma_like.FOUR_NORM_NAMES, norms={**gemma_like.FOUR_NORM_NAMES.norms, **llama_like.QUERY_KEY_NORMS})
GEMMA3_TEXT = Family(model_type="gemma3_text", spec=spec, names=gemma_like.with_default_targets(NAMES))
# PEFT has no default targets for it.
GEMMA3 = Family(
    model_type="gemma3",
    spec=multimodal_spec,
    names=replace(
        gemma_like.inside(NAMES, "model.language_model"),
        renames=(
            (r"^language_model\.model\.", "model.language_model."),
            (r"^language_model\.lm_head\.", "lm_head."),
            (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
        ),
        unused_modules=(r"model\.(vision_tower|multi_modal_projector)",),
    ),
)
