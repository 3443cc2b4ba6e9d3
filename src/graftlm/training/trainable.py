"""A LoRA that is being trained: its parameters, and the patch they make at this moment."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from graftlm.adapters.config import LoraConfig
from graftlm.adapters.methods.dora import dora_output, dora_scale
from graftlm.adapters.module_tensors import PEFT_PREFIX, ModuleTensors, check_shape
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.kernels import ops
from graftlm.layers.patch import ModelPatch
from graftlm.models.base_weights import BaseWeights
from graftlm.training.start import Start

LINEAR_ROLES = ("lora_A.weight", "lora_B.weight")
EMBEDDING_ROLES = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE_ROLE = "lora_magnitude_vector"


class TrainableLora:
    """LoRA, rsLoRA or DoRA on linear layers, the output head and the token embedding.

    parameters: tensors under the names PEFT saves them by, in float32 (float64 over a float64 base) whatever the base
    is held in: bfloat16 is too coarse to add a learning rate's worth to.

    Raises:
        AdapterError: the tensors to start from do not fit the base.
    """

    def __init__(self, start: Start, base: BaseWeights, *, seed: int) -> None:
        self._base = base
        self._config: LoraConfig = start.config
        self._targets = start.targets
        self._dtype = torch.promote_types(base.dtype, torch.float32)
        if start.tensors is None:
            values = self._fresh(torch.Generator().manual_seed(seed))
        else:
            values = self._given(start.tensors)
        self.parameters: dict[str, Tensor] = {
            name: value.to(base.device, self._dtype, copy=True).requires_grad_() for name, value in values.items()
        }

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def patch(self) -> ModelPatch:
        """What the adapter does now, differentiable in the parameters."""
        builder = PatchBuilder(self._base)
        for path in self._targets:
            if path == self._base.sites.embedding_path:
                self._patch_embedding(builder, path)
            else:
                self._patch_linear(builder, path)
        return builder.build()

    def _patch_linear(self, builder: PatchBuilder, path: str) -> None:
        lora_a, lora_b = (self._parameter(path, role) for role in LINEAR_ROLES)
        factor_b = lora_b * self._scaling(path)
        if self._config.use_dora:
            weight = self._base.linear(path).dequantize()
            scale = dora_scale(self._parameter(path, MAGNITUDE_ROLE), weight, lora_a, factor_b)
            builder.transform_output(path, dora_output(scale, self._base.bias(path)))
            factor_b = factor_b * scale[:, None]
        builder.add_factors(path, lora_a, factor_b)

    def _patch_embedding(self, builder: PatchBuilder, path: str) -> None:
        lora_a, lora_b = (self._parameter(path, role) for role in EMBEDDING_ROLES)
        factor_b = lora_b * self._scaling(path)
        scale = None
        if self._config.use_dora:
            table = self._base.embedding().t()
            scale = dora_scale(self._parameter(path, MAGNITUDE_ROLE), table, lora_a, factor_b)
        builder.add_embedding_low_rank(lora_a.t(), factor_b.t(), scale)

    def _scaling(self, path: str) -> float:
        return self._config.scaling_of(path, self._config.rank_of(path))

    def _parameter(self, path: str, role: str) -> Tensor:
        return self.parameters[_name(path, role)]

    def _shapes(self, path: str) -> dict[str, tuple[int, ...]]:
        """Of a module's parameters, the A first."""
        sites, rank = self._base.sites, self._config.rank_of(path)
        if path == sites.embedding_path:
            roles, out_features, in_features = EMBEDDING_ROLES, sites.embedding_size, sites.vocab_size
        else:
            site = sites.matrices[path]
            roles, out_features, in_features = LINEAR_ROLES, site.out_features, site.in_features
        shapes: dict[str, tuple[int, ...]] = {roles[0]: (rank, in_features), roles[1]: (out_features, rank)}
        return {**shapes, MAGNITUDE_ROLE: (out_features,)} if self._config.use_dora else shapes

    def _fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """As PEFT initialises: of A and B one is random and one zero, so that the adapter changes nothing yet.

        Source: peft/tuners/lora/layer.py, reset_lora_parameters and dora_init (0.21).
        """
        values: dict[str, Tensor] = {}
        for path in self._targets:
            shapes = self._shapes(path)
            if path == self._base.sites.embedding_path:
                values[_name(path, EMBEDDING_ROLES[0])] = torch.zeros(shapes[EMBEDDING_ROLES[0]])
                values[_name(path, EMBEDDING_ROLES[1])] = torch.randn(shapes[EMBEDDING_ROLES[1]], generator=generator)
            else:
                shape = shapes[LINEAR_ROLES[0]]
                uniform = torch.rand(shape, generator=generator) * 2 - 1
                values[_name(path, LINEAR_ROLES[0])] = uniform / math.sqrt(shape[1])
                values[_name(path, LINEAR_ROLES[1])] = torch.zeros(shapes[LINEAR_ROLES[1]])
            if self._config.use_dora:
                values[_name(path, MAGNITUDE_ROLE)] = self._lengths(path)
        return values

    def _lengths(self, path: str) -> Tensor:
        is_embedding = path == self._base.sites.embedding_path
        weight = self._base.embedding().t() if is_embedding else self._base.linear(path).dequantize()
        lengths: Tensor = torch.linalg.vector_norm(ops.widened(weight), dim=1)
        return lengths

    def _given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sites = self._base.sites
        found = ModuleTensors(tensors, sites)
        values: dict[str, Tensor] = {}
        for path in self._targets:
            for role, shape in self._shapes(path).items():
                tensor = found.require(path, role)
                check_shape(f"{role} of {path}", tensor, shape)
                values[_name(path, role)] = tensor
        for end in (sites.embedding_path, sites.head_path):
            # PEFT saves the base's own matrix beside an adapter on it.
            for role in ("weight", "base_layer.weight"):
                found.take(end, role)
        found.check_all_taken()
        return values


def _name(path: str, role: str) -> str:
    return f"{PEFT_PREFIX}{path}.{role}"
