"""FourierFT: an update with few frequencies, at places drawn from a seed.

Source: arXiv 2405.03003; peft/tuners/fourierft (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graftlm.adapters.config_values import read_number, read_seed
from graftlm.adapters.methods.compiled import CompiledAdapter
from graftlm.adapters.methods.fold import Dense, FoldedLinear, Folding
from graftlm.adapters.module_tensors import ModuleTensors
from graftlm.adapters.target_config import LAYER_FIELDS, ConfigFields, parse_target_config
from graftlm.errors import AdapterIncompatible
from graftlm.models.base_weights import BaseWeights

FIELDS = ConfigFields(
    read=LAYER_FIELDS | {"bias", "exclude_modules", "random_loc_seed", "scaling"},
    # The number of frequencies is the length of the spectrum in the file.
    inert=frozenset({"fan_in_fan_out", "init_weights", "n_frequency", "n_frequency_pattern"}),
)
ROLE = "fourierft_spectrum"


def compile_fourierft(raw: Mapping[str, Any], tensors: ModuleTensors, base: BaseWeights) -> CompiledAdapter:
    """Compile a config of peft_type FOURIERFT: W + scaling * real(ifft2(spectrum)).

    Raises:
        AdapterUnsupported, AdapterIncompatible, AdapterCorrupt
    """
    config = parse_target_config(raw, FIELDS)
    scaling = read_number("scaling", raw.get("scaling"), default=150.0)
    seed = read_seed("random_loc_seed", raw.get("random_loc_seed"), default=777)

    def fold(linear: FoldedLinear) -> Dense:
        values = linear.require(ROLE, None)
        size = linear.out_features * linear.in_features
        if len(values) > size:
            raise AdapterIncompatible(f"{ROLE} of {linear.path} has more frequencies than {size}", got=len(values))
        places = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: len(values)]
        spectrum = values.new_zeros(size)
        spectrum[places.to(values.device)] = values
        return Dense(delta=torch.fft.ifft2(spectrum.view(linear.out_features, linear.in_features)).real * scaling)

    return Folding(config, tensors, base, base.sites.linears).compile("FourierFT", (ROLE,), fold)
