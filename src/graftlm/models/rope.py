"""Rotary frequencies from a spec, in float32 and in the order of operations transformers uses, so that angles at large
positions agree to the bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graftlm.layers.rotary import RotaryEmbedding
from graftlm.models.spec import RopeSpec


def rotary_embedding(spec: RopeSpec, device: torch.device) -> RotaryEmbedding:
    """The embedding a spec describes."""
    return RotaryEmbedding(inverse_frequencies(spec).to(device))


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[dims / 2] float32: radians per position of each pair of dimensions.

    Source: transformers/modeling_rope_utils.py; the llama3 rule is Llama 3.1's reference code.
    """
    exponents = torch.arange(0, spec.dims, 2, dtype=torch.int64).float() / spec.dims
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "frequency_factors":
        return frequencies / torch.tensor(spec.frequency_factors, dtype=torch.float32)
    if spec.kind == "llama3":
        return _llama3(frequencies, spec)
    return frequencies


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    context = spec.original_max_position_embeddings
    low_wavelength = context / spec.low_freq_factor
    high_wavelength = context / spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > low_wavelength, frequencies / spec.factor, frequencies)
    smooth = (context / wavelengths - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * stretched / spec.factor + smooth * stretched
    between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return torch.where(between, blended, stretched)
