"""LoRA, rsLoRA and DoRA on linear layers, the output head and the token embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from graftlm.adapters.config import LoraConfig
from graftlm.adapters.methods.dora import dora_output, dora_scale
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.kernels import ops
from graftlm.layers.transforms import Affine
from graftlm.models.base_weights import BaseWeights
from graftlm.training.dropout import Dropout
from graftlm.training.parts.part import ParameterKey

LINEAR_ROLES = ("lora_A.weight", "lora_B.weight")
LORA_BIAS_ROLE = "lora_B.bias"
EMBEDDING_ROLES = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE_ROLE = "lora_magnitude_vector"


class LowRankPart:
    """targets: paths of the modules, in model order."""

    def __init__(self, config: LoraConfig, targets: tuple[str, ...], base: BaseWeights) -> None:
        self._config = config
        self._targets = targets
        self._base = base

    def fresh(self, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
        """As PEFT initialises: of A and B one is random and one zero.

        Source: peft/tuners/lora/layer.py, reset_lora_parameters and dora_init (0.21).
        """
        values: dict[ParameterKey, Tensor] = {}
        for path in self._targets:
            rank = self._config.rank_of(path)
            if path == self._base.sites.embedding_path:
                sites, (role_a, role_b) = self._base.sites, EMBEDDING_ROLES
                values[ParameterKey(path, role_a)] = torch.zeros(rank, sites.vocab_size)
                values[ParameterKey(path, role_b)] = torch.randn(sites.embedding_size, rank, generator=generator)
            else:
                site, (role_a, role_b) = self._base.sites.matrices[path], LINEAR_ROLES
                values[ParameterKey(path, role_a)] = uniform_factor(rank, site.in_features, generator)
                values[ParameterKey(path, role_b)] = torch.zeros(site.out_features, rank)
                if self._config.use_lora_bias:
                    values[ParameterKey(path, LORA_BIAS_ROLE)] = torch.zeros(site.out_features)
            if self._config.use_dora:
                values[ParameterKey(path, MAGNITUDE_ROLE)] = self._lengths(path)
        return values

    def add_to(
        self, builder: PatchBuilder, values: Mapping[ParameterKey, Tensor], dropout: Dropout | None = None
    ) -> None:
        for path in self._targets:
            if path == self._base.sites.embedding_path:
                self._add_embedding(builder, path, values)  # PEFT drops none of its inputs either
                continue
            if self._config.use_lora_bias:
                shift = values[ParameterKey(path, LORA_BIAS_ROLE)] * self._scaling(path)
                builder.transform_output(path, Affine(shift=shift))
            if dropout is None:
                self._add_linear(builder, path, values)
            else:
                self._add_masked(builder, path, values, dropout)

    def _add_linear(self, builder: PatchBuilder, path: str, values: Mapping[ParameterKey, Tensor]) -> None:
        lora_a, lora_b = (values[ParameterKey(path, role)] for role in LINEAR_ROLES)
        if not self._config.use_dora:
            builder.add_factors(path, lora_a, lora_b, self._scaling(path))
            return
        factor_b = lora_b * self._scaling(path)
        scale = self._dora_scale(path, values, lora_a, factor_b)
        builder.transform_output(path, dora_output(scale, self._base.bias(path)))
        builder.add_factors(path, lora_a, factor_b * scale[:, None])

    def _add_masked(
        self, builder: PatchBuilder, path: str, values: Mapping[ParameterKey, Tensor], dropout: Dropout
    ) -> None:
        """With DoRA as PEFT does it: W x + b + (g - 1) * W u + g * B A u, where u is what is left of x.

        Source: peft/tuners/lora/layer.py, Linear.forward, and lora/dora.py (0.21).
        """
        lora_a, lora_b = (values[ParameterKey(path, role)] for role in LINEAR_ROLES)
        scaling, gain = self._scaling(path) * dropout.gain, None
        if self._config.use_dora:
            scale = self._dora_scale(path, values, lora_a, lora_b * self._scaling(path))
            lora_b, gain = lora_b * scale[:, None], (scale - 1) * dropout.gain
        mask = dropout.head_mask(path) if path == self._base.sites.head_path else dropout.mask(path)
        builder.add_masked_factors(path, mask, lora_a, lora_b, scaling, gain)

    def _dora_scale(self, path: str, values: Mapping[ParameterKey, Tensor], lora_a: Tensor, factor_b: Tensor) -> Tensor:
        weight = self._base.linear(path).dequantize()
        return dora_scale(values[ParameterKey(path, MAGNITUDE_ROLE)], weight, lora_a, factor_b)

    def _add_embedding(self, builder: PatchBuilder, path: str, values: Mapping[ParameterKey, Tensor]) -> None:
        lora_a, lora_b = (values[ParameterKey(path, role)] for role in EMBEDDING_ROLES)
        factor_b = lora_b * self._scaling(path)
        scale = None
        if self._config.use_dora:
            table = self._base.embedding().t()
            scale = dora_scale(values[ParameterKey(path, MAGNITUDE_ROLE)], table, lora_a, factor_b)
        builder.add_embedding_low_rank(lora_a.t(), factor_b.t(), scale)

    def _scaling(self, path: str) -> float:
        return self._config.scaling_of(path, self._config.rank_of(path))

    def _lengths(self, path: str) -> Tensor:
        is_embedding = path == self._base.sites.embedding_path
        weight = self._base.embedding().t() if is_embedding else self._base.linear(path).dequantize()
        lengths: Tensor = torch.linalg.vector_norm(ops.widened(weight), dim=1)
        return lengths


def uniform_factor(rank: int, in_features: int, generator: torch.Generator) -> Tensor:
    """A fresh A, [rank, in], uniform within 1 / sqrt(in): torch's own initialisation of a linear layer."""
    return (torch.rand((rank, in_features), generator=generator) * 2 - 1) / math.sqrt(in_features)
