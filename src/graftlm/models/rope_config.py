"""Rotary embedding settings of config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

from graftlm.errors import CheckpointError
from graftlm.models.config_reader import ConfigReader
from graftlm.models.spec import RopeSpec


def read_rope(
    config: ConfigReader, head_dim: int, *, default_theta: float = 10_000.0, default_partial: float = 1.0
) -> RopeSpec:
    """The one rotary embedding of a model.

    transformers 5 writes `rope_parameters` with theta inside; 4 wrote `rope_scaling` beside `rope_theta` and
    `partial_rotary_factor`, and "type" for "rope_type".

    Raises:
        CheckpointError: an unknown rope type, or one of its numbers is missing.
    """
    theta = config.number("rope_theta", default_theta)
    partial = config.number("partial_rotary_factor", default_partial)
    settings = config.section("rope_parameters")
    if config.get("rope_scaling"):
        settings = config.section("rope_scaling")
    return rope_of(settings, head_dim, theta=theta, partial=partial)


def rope_of(settings: ConfigReader, head_dim: int, *, theta: float, partial: float = 1.0) -> RopeSpec:
    """One set of rope parameters.

    Args:
        theta, partial: what counts when the settings do not say. partial: the share of a head that is rotated.

    Raises:
        CheckpointError: an unknown rope type, or one of its numbers is missing.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    theta = settings.number("rope_theta", theta)
    dims = int(head_dim * settings.number("partial_rotary_factor", partial))
    if kind == "default":
        return RopeSpec(theta=theta, dims=dims)
    if kind == "linear":
        return RopeSpec(theta=theta, dims=dims, kind="linear", factor=settings.number("factor"))
    if kind == "frequency_factors":
        factors = tuple(float(factor) for factor in settings.get("factors"))
        return RopeSpec(theta=theta, dims=dims, kind="frequency_factors", frequency_factors=factors)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            dims=dims,
            kind="llama3",
            factor=settings.number("factor"),
            low_freq_factor=settings.number("low_freq_factor"),
            high_freq_factor=settings.number("high_freq_factor"),
            original_max_position_embeddings=settings.integer("original_max_position_embeddings"),
        )
    raise CheckpointError("config.json: this rope type is not supported", got=kind, allowed="default, linear, llama3")
