"""The matrices of a model as they are held in memory: kept as stored, dequantised, or quantised while they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.models.layout import LinearLayout, ModuleLayout
from graftlm.models.stored_weights import StoredWeights
from graftlm.quantization import DenseWeight, StackedWeight, Weight
from graftlm.quantization.format import Quantizer
from graftlm.quantization.policy import LoadPolicy


class Matrices:
    """Reads one layer at a time, so that no more than one is in full precision if it is not to stay so.

    dtype: the compute dtype.
    """

    def __init__(self, stored: StoredWeights, policy: LoadPolicy, *, dtype: torch.dtype, device: torch.device) -> None:
        self._stored = stored
        self._policy = policy
        self._dtype = dtype
        self._device = device

    def linear(self, layout: LinearLayout) -> Weight:
        """The weight of a layer of the decoder, [out, in], however its modules are stored."""
        return self._weight(layout.modules, layout.in_features, self._policy.quantizer)

    def router(self, layout: LinearLayout) -> Weight:
        """The weight that chooses experts: too small to be worth quantising, and its errors send tokens astray."""
        return self._weight(layout.modules, layout.in_features, None)

    def head(self, layout: LinearLayout) -> Weight:
        """The weight of an output head that is not the token table."""
        return self._weight(layout.modules, layout.in_features, self._head_quantizer)

    def table(self, path: str, shape: tuple[int, int], *, is_head: bool) -> Weight:
        """The token table. is_head: whether it is the output head as well."""
        module = ModuleLayout(path=path, rows=shape[0])
        return self._weight((module,), shape[1], self._head_quantizer if is_head else None)

    @property
    def _head_quantizer(self) -> Quantizer | None:
        return self._policy.quantizer if self._policy.quantize_head else None

    def _weight(self, modules: Sequence[ModuleLayout], in_features: int, quantizer: Quantizer | None) -> Weight:
        if quantizer is None and not any(self._is_kept(module) for module in modules):
            return DenseWeight(self._stack(modules, in_features))
        parts = [self._part(module, in_features, quantizer) for module in modules]
        return parts[0] if len(parts) == 1 else StackedWeight(parts)

    def _is_kept(self, module: ModuleLayout) -> bool:
        return self._policy.keep_stored and self._stored.is_quantized(module.path)

    def _part(self, module: ModuleLayout, in_features: int, quantizer: Quantizer | None) -> Weight:
        if self._is_kept(module):
            shape = (module.rows, in_features)
            return self._stored.quantized(module.path, shape, dtype=self._dtype, device=self._device)
        if quantizer is None:
            return DenseWeight(self._stack((module,), in_features))
        # Rounded to the compute dtype first, as transformers does.
        matrix = self._full(module, in_features).to(device=self._device, dtype=self._dtype)
        return quantizer.quantize(matrix, dtype=self._dtype)

    def _stack(self, modules: Sequence[ModuleLayout], in_features: int) -> Tensor:
        """Matrices one under the other, copied out of the file: a file that is later truncated cannot hurt."""
        rows = sum(module.rows for module in modules)
        stacked = torch.empty((rows, in_features), dtype=self._dtype, device=self._device)
        start = 0
        for module in modules:
            stacked[start : start + module.rows].copy_(self._full(module, in_features))
            start += module.rows
        return stacked

    def _full(self, module: ModuleLayout, in_features: int) -> Tensor:
        return self._stored.full(module, in_features, dtype=self._dtype, device=self._device)
