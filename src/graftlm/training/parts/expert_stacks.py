"""LoRA on the experts of a mixture: PEFT's `target_parameters`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graftlm.adapters.config import LoraConfig
from graftlm.adapters.methods.parameters import expert_factors, stack_roles
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.models.base_weights import BaseWeights
from graftlm.models.site import ExpertStack
from graftlm.training.dropout import Dropout
from graftlm.training.parts.low_rank import uniform_factor
from graftlm.training.parts.part import ParameterKey


class ExpertStackPart:
    """Each expert of a stack has a pair of factors; PEFT keeps a stack's pairs in two matrices."""

    def __init__(self, config: LoraConfig, stacks: tuple[ExpertStack, ...], base: BaseWeights) -> None:
        self._config = config
        self._base = base
        self._keys = {
            stack.path: (ParameterKey(stack.module, role_a), ParameterKey(stack.module, role_b))
            for stack, (role_a, role_b) in stack_roles(stacks)
        }
        self._stacks = stacks

    def fresh(self, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
        """Source: peft/tuners/lora/layer.py, ParamWrapper.update_layer (0.21)."""
        values: dict[ParameterKey, Tensor] = {}
        for stack in self._stacks:
            rank = self._config.rank_of(stack.path) * len(stack.experts)
            site = self._base.sites.matrices[stack.experts[0]]
            key_a, key_b = self._keys[stack.path]
            values[key_a] = uniform_factor(rank, site.in_features, generator)
            values[key_b] = torch.zeros(site.out_features, rank)
        return values

    def add_to(
        self, builder: PatchBuilder, values: Mapping[ParameterKey, Tensor], dropout: Dropout | None = None
    ) -> None:
        for stack in self._stacks:
            rank = self._config.rank_of(stack.path)
            lora_a, lora_b = (values[key] for key in self._keys[stack.path])
            factor_b = lora_b * self._config.scaling_of(stack.path, rank)
            for index, path in enumerate(stack.experts):
                builder.add_factors(path, *expert_factors(lora_a, factor_b, index, count=len(stack.experts)))
