"""Rotary embeddings from specs, in float32 and in the order of operations transformers uses, so that angles at large
positions agree to the bit.

Source: transformers/modeling_rope_utils.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graftlm.layers.rotary import DynamicRotary, FixedRotary, LongRotary, RotaryEmbedding
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


def rotary_embedding(spec: RopeSpec, device: torch.device) -> RotaryEmbedding:
    """The embedding a spec describes."""
    # In int64 first: an arange in float32 is another number on some devices.
    exponents = torch.arange(0, spec.dims, 2, dtype=torch.int64).float() / spec.dims
    periods = spec.theta**exponents
    match spec.scaling:
        case DynamicScaling(factor=factor, original_max_position_embeddings=context):
            return DynamicRotary(theta=spec.theta, exponents=exponents.to(device), factor=factor, context=context)
        case LongRopeScaling(short_factors=short, long_factors=long, original_max_position_embeddings=context):
            return LongRotary(
                short=(1.0 / (torch.tensor(short) * periods)).to(device),
                long=(1.0 / (torch.tensor(long) * periods)).to(device),
                context=context,
                attention_factor=spec.attention_factor,
            )
        case _:
            frequencies = _frequencies(periods, spec.scaling, spec)
            return FixedRotary(inverse_frequencies=frequencies.to(device), attention_factor=spec.attention_factor)


def _frequencies(periods: Tensor, scaling: RopeScaling | None, spec: RopeSpec) -> Tensor:
    """[dims / 2] float32: radians per position of each pair of dimensions, where they depend on nothing."""
    match scaling:
        case LinearScaling(factor=factor):
            return 1.0 / periods / factor
        case FrequencyFactors(factors=factors):
            return 1.0 / periods / torch.tensor(factors)
        case Llama3Scaling():
            return _llama3(1.0 / periods, scaling)
        case YarnScaling():
            return _yarn(periods, scaling, spec)
        case _:
            return 1.0 / periods


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, blended, stretched)


def _yarn(periods: Tensor, scaling: YarnScaling, spec: RopeSpec) -> Tensor:
    """Source: arXiv 2309.00071, equations 17 to 23."""
    low, high = (_dimension_of(turns, scaling, spec) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dimension_of(turns: float, scaling: YarnScaling, spec: RopeSpec) -> float:
    """Which pair of dimensions turns this often within the original context."""
    context = scaling.original_max_position_embeddings
    return spec.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
