"""Rotary embedding settings of config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.rope_spec import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)


def read_rope(
    config: ConfigReader,
    head_dim: int,
    *,
    default_theta: float = 10_000.0,
    default_partial: float = 1.0,
    renamed_types: Mapping[str, str] | None = None,
) -> RopeSpec:
    """The one rotary embedding of a model.

    transformers 5 writes `rope_parameters` with theta inside; 4 wrote `rope_scaling` beside `rope_theta` and
    `partial_rotary_factor`, and "type" for "rope_type".

    Args:
        renamed_types: what a family's old files call rope types.

    Raises:
        CheckpointError: an unknown rope type or setting, or a number is missing.
    """
    config.ignore("original_max_position_embeddings")
    theta = config.number("rope_theta", default_theta)
    partial = config.number("partial_rotary_factor", default_partial)
    settings = config.section("rope_parameters")
    if config.get("rope_scaling"):
        settings = config.section("rope_scaling")
    return rope_of(config, settings, head_dim, theta=theta, partial=partial, renamed_types=renamed_types)


def rope_of(
    config: ConfigReader,
    settings: ConfigReader,
    head_dim: int,
    *,
    theta: float,
    partial: float = 1.0,
    renamed_types: Mapping[str, str] | None = None,
) -> RopeSpec:
    """One set of rope parameters.

    Args:
        config: the whole config, which says how long the contexts are. settings: the set.
        theta, partial: what counts when the settings do not say. partial: the share of a head that is rotated.

    Raises:
        CheckpointError: an unknown rope type or setting, or a number is missing.
    """
    written = settings.get("rope_type", settings.get("type", "default"))
    kind = (renamed_types or {}).get(written, written) if isinstance(written, str) else written
    theta = settings.number("rope_theta", theta)
    dims = int(head_dim * settings.number("partial_rotary_factor", partial))
    # Written for all types by one exporter or another; they mean something only where they are read.
    settings.ignore("factor", "finetuned", "original_max_position_embeddings")
    if not isinstance(kind, str) or kind not in _READERS:
        raise CheckpointError(
            "config.json: this rope type is not supported", got=repr(written)[:100], allowed=", ".join(_READERS)
        )
    scaling, attention_factor = _READERS[kind](config, settings)
    if isinstance(scaling, LongRopeScaling):
        _check_factors(scaling, dims)
    settings.refuse_unread()
    return RopeSpec(theta=theta, dims=dims, scaling=scaling, attention_factor=attention_factor)


def proportional_rope(settings: ConfigReader, head_dim: int, *, theta: float, share: float) -> RopeSpec:
    """Rotary positions of a share of a head's pairs, at the frequencies they have in the whole; the others stand still.

    Args:
        theta, share: what counts when the settings do not say.

    Raises:
        CheckpointError: an unknown setting.
    """
    settings.ignore("rope_type")
    turning = int(settings.number("partial_rotary_factor", share) * head_dim // 2)
    factors = (settings.number("factor", 1.0),) * turning + (math.inf,) * (head_dim // 2 - turning)
    theta = settings.number("rope_theta", theta)
    settings.refuse_unread()
    return RopeSpec(theta=theta, dims=head_dim, scaling=FrequencyFactors(factors=factors))


def _default(config: ConfigReader, settings: ConfigReader) -> tuple[None, float]:
    return None, 1.0


def _linear(config: ConfigReader, settings: ConfigReader) -> tuple[LinearScaling, float]:
    return LinearScaling(factor=settings.number("factor")), 1.0


def _dynamic(config: ConfigReader, settings: ConfigReader) -> tuple[DynamicScaling, float]:
    # The context that is scaled is the model's own, whatever the settings say of an original one.
    context = config.integer("max_position_embeddings")
    return DynamicScaling(factor=settings.number("factor"), original_max_position_embeddings=context), 1.0


def _frequency_factors(config: ConfigReader, settings: ConfigReader) -> tuple[FrequencyFactors, float]:
    return FrequencyFactors(factors=settings.numbers("factors")), 1.0


def _llama3(config: ConfigReader, settings: ConfigReader) -> tuple[Llama3Scaling, float]:
    scaling = Llama3Scaling(
        factor=settings.number("factor"),
        low_freq_factor=settings.number("low_freq_factor"),
        high_freq_factor=settings.number("high_freq_factor"),
        original_max_position_embeddings=_original_context(config, settings),
    )
    return scaling, 1.0


def _yarn(config: ConfigReader, settings: ConfigReader) -> tuple[YarnScaling, float]:
    original = _original_context(config, settings)
    factor = _stretch(config, settings, original)
    mscale, mscale_all_dim = (settings.number_or_zero(key) for key in ("mscale", "mscale_all_dim"))
    inferred = (
        _mscale(factor, mscale) / _mscale(factor, mscale_all_dim) if mscale and mscale_all_dim else _mscale(factor)
    )
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=settings.number_or_zero("beta_fast") or 32.0,
        beta_slow=settings.number_or_zero("beta_slow") or 1.0,
        truncate=settings.flag("truncate", True),
    )
    return scaling, settings.number("attention_factor", inferred)


def _longrope(config: ConfigReader, settings: ConfigReader) -> tuple[LongRopeScaling, float]:
    original = _original_context(config, settings)
    factor = _stretch(config, settings, original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaling = LongRopeScaling(
        short_factors=settings.numbers("short_factor"),
        long_factors=settings.numbers("long_factor"),
        original_max_position_embeddings=original,
    )
    return scaling, settings.number("attention_factor", inferred)


_READERS: dict[str, Callable[[ConfigReader, ConfigReader], tuple[RopeScaling | None, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "frequency_factors": _frequency_factors,
}


def _original_context(config: ConfigReader, settings: ConfigReader) -> int:
    """Tokens before the scaling: beside the settings (Phi-3), or in them; the model's own when nothing says."""
    for place in (config, settings):
        if place.get("original_max_position_embeddings") is not None:
            return place.integer("original_max_position_embeddings")
    return config.integer("max_position_embeddings")


def _stretch(config: ConfigReader, settings: ConfigReader, original: int) -> float:
    """How many times the original context the model has."""
    if settings.get("factor") is not None:
        return settings.number("factor")
    return config.integer("max_position_embeddings") / original


def _mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _check_factors(scaling: LongRopeScaling, dims: int) -> None:
    for key, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
        if len(factors) != dims // 2:
            raise CheckpointError(
                f"config.json: {key} of the rope settings needs a number for each pair of rotated dimensions",
                got=len(factors),
                allowed=str(dims // 2),
            )
