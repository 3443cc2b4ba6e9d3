"""Modules that are trained whole: PEFT's `modules_to_save`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.models.base_weights import BaseWeights
from graftlm.training.dropout import Dropout
from graftlm.training.parts.part import ParameterKey

WEIGHT_ROLE, BIAS_ROLE = "weight", "bias"


class WholeModulesPart:
    """Linear layers, norms, the embedding and the head. Each is the adapter's own: of a tied base, too, a trained
    embedding leaves the head as it is.

    paths: of the modules, in model order.
    """

    def __init__(self, paths: tuple[str, ...], base: BaseWeights) -> None:
        self._paths = paths
        self._base = base

    def fresh(self, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
        """The base's own values."""
        values: dict[ParameterKey, Tensor] = {}
        for path in self._paths:
            weight, bias = self._of_base(path)
            values[ParameterKey(path, WEIGHT_ROLE)] = weight
            if bias is not None:
                values[ParameterKey(path, BIAS_ROLE)] = bias
        return values

    def add_to(
        self, builder: PatchBuilder, values: Mapping[ParameterKey, Tensor], dropout: Dropout | None = None
    ) -> None:
        sites = self._base.sites
        for path in self._paths:
            weight, bias = values[ParameterKey(path, WEIGHT_ROLE)], values.get(ParameterKey(path, BIAS_ROLE))
            if path in sites.norms:
                builder.replace_norm(path, weight, bias)
            elif path == sites.embedding_path:
                builder.replace_table(weight)
            else:
                builder.replace_linear(path, weight.t() if sites.matrices[path].transposed else weight, bias)

    def _of_base(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Weight, as PEFT sees it, and bias."""
        sites = self._base.sites
        if path in sites.norms:
            return self._base.norm(path)
        if path == sites.embedding_path:
            return self._base.embedding(), None
        weight = self._base.linear(path).dequantize()
        return weight.t() if sites.matrices[path].transposed else weight, self._base.bias(path)
