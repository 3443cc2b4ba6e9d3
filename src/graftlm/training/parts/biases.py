"""Biases of linear layers and norms: PEFT's `bias`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graftlm.adapters.config import LoraConfig
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.errors import AdapterUnsupported, ConfigurationError
from graftlm.kernels import ops
from graftlm.layers.transforms import Affine
from graftlm.models.base_weights import BaseWeights
from graftlm.training.dropout import Dropout
from graftlm.training.parts.part import ParameterKey

BIAS_ROLE, WRAPPED_ROLE = "bias", "base_layer.bias"


class BiasPart:
    """Each takes the place of the base's; PEFT saves it as it is, not what was added to it.

    adapted: paths of the modules with a low-rank update. saved: of those that are trained whole, bias included.

    Raises:
        ConfigurationError: the config asks for biases, and there is none.
        AdapterUnsupported: for all of a mixture of experts, whose stacked biases are no module's.
    """

    def __init__(self, config: LoraConfig, adapted: tuple[str, ...], saved: tuple[str, ...], base: BaseWeights) -> None:
        self._base = base
        sites = base.sites
        chosen: tuple[str, ...] = ()
        if config.bias == "adapted":
            chosen = adapted
        elif config.bias == "all":
            if sites.expert_stacks or sites.expert_modules:
                raise AdapterUnsupported(
                    "bias=all is not trained in mixtures of experts", allowed="none, lora_only", do="train others"
                )
            chosen = (*sites.norms, *sites.linears)
        self._keys = {
            path: ParameterKey(path, WRAPPED_ROLE if path in adapted else BIAS_ROLE)
            for path in chosen
            if path not in saved and self._of_base(path) is not None
        }
        if config.bias != "none" and not self._keys:
            raise ConfigurationError(
                "no module that bias asks for has one",
                got="lora_only" if config.bias == "adapted" else config.bias,
                do="leave bias out",
            )

    def fresh(self, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
        """The base's own."""
        return {key: bias for path, key in self._keys.items() if (bias := self._of_base(path)) is not None}

    def add_to(
        self, builder: PatchBuilder, values: Mapping[ParameterKey, Tensor], dropout: Dropout | None = None
    ) -> None:
        for path, key in self._keys.items():
            bias = self._of_base(path)
            if path in self._base.sites.norms:
                builder.replace_norm(path, self._base.norm(path)[0], values[key])
            elif bias is not None:
                builder.transform_output(path, Affine(shift=values[key] - ops.widened(bias)))

    def _of_base(self, path: str) -> Tensor | None:
        sites = self._base.sites
        if path in sites.norms:
            return self._base.norm(path)[1]
        return self._base.bias(path) if path in sites.linears else None
