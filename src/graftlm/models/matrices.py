"""The matrices of a model as they are held in memory: kept as stored, dequantised, or quantised while they are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.kernels.kernel_set import Kernels
from graftlm.models.layout import LinearLayout, ModuleLayout
from graftlm.models.quantized_cache import QuantizedCache
from graftlm.models.quantized_modules import QuantizedModules
from graftlm.models.stored_weights import StoredWeights
from graftlm.models.tensor_share import MatrixShare, Part
from graftlm.quantization import DenseWeight, StackedWeight, Weight
from graftlm.quantization.bitsandbytes.mixed_int8_weight import with_outliers
from graftlm.quantization.format import Quantizer
from graftlm.quantization.own_memory import with_own_memory
from graftlm.quantization.packed import coded_weight, dense_weight
from graftlm.quantization.policy import LoadPolicy


class Matrices:
    """Reads one layer at a time, so that no more than one is in full precision if it is not to stay so.

    cache: matrices that were quantised at an earlier start; asked first, and given what it lacks.
    dtype: the compute dtype. kernels: those that will compute with the matrices.

    quantized: what was quantised so far, by now or earlier.
    """

    def __init__(
        self,
        stored: StoredWeights,
        policy: LoadPolicy,
        cache: QuantizedCache | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._stored = stored
        self._policy = policy
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self.quantized = QuantizedModules()

    def linear(self, layout: LinearLayout, share: MatrixShare | None = None) -> Weight:
        """The weight of a layer of the decoder, [out, in], however its modules are stored. share: the part that is
        wanted."""
        return self._weight(layout.modules, layout.in_features, quantize=True, share=share)

    def router(self, layout: LinearLayout) -> Weight:
        """The weight that chooses experts: too small to be worth quantising, and its errors send tokens astray."""
        return self._weight(layout.modules, layout.in_features, quantize=False)

    def head(self, layout: LinearLayout, share: MatrixShare | None = None) -> Weight:
        """The weight of an output head that is not the token table."""
        return self._weight(layout.modules, layout.in_features, quantize=self._policy.quantize_head, share=share)

    def table(
        self, path: str, shape: tuple[int, int], *, head: LinearLayout | None, share: MatrixShare | None = None
    ) -> Weight:
        """The token table. head: the output head where that is the same matrix; it may be skipped by either name."""
        module = ModuleLayout(path=path, rows=shape[0])
        if head is None and not self._is_kept(module):
            # Rows of it are all that is ever read.
            return DenseWeight(self._stack((module,), shape[1], share))
        quantize = (
            head is not None
            and self._policy.quantize_head
            and all(self._policy.quantizer(part.path) is not None for part in head.modules)
        )
        return self._weight((module,), shape[1], quantize=quantize, share=share)

    def _weight(
        self, modules: Sequence[ModuleLayout], in_features: int, *, quantize: bool, share: MatrixShare | None = None
    ) -> Weight:
        quantizers = [self._policy.quantizer(module.path) if quantize else None for module in modules]
        if not any(quantizers) and not any(self._is_kept(module) for module in modules):
            return dense_weight(self._stack(modules, in_features, share), self._kernels)
        parts = [
            self._part(module, in_features, quantizer) for module, quantizer in zip(modules, quantizers, strict=True)
        ]
        if share is not None:
            parts = _cut_parts(parts, share)
        parts = [coded_weight(part, self._kernels, dtype=self._dtype) for part in parts]
        return parts[0] if len(parts) == 1 else StackedWeight(parts)

    def _is_kept(self, module: ModuleLayout) -> bool:
        return self._policy.keep_stored and self._stored.is_quantized(module.path)

    def _part(self, module: ModuleLayout, in_features: int, quantizer: Quantizer | None) -> Weight:
        if self._is_kept(module):
            stored = self._stored.quantized(module, in_features, dtype=self._dtype, device=self._device)
            return with_outliers(stored, self._policy.int8_threshold)
        if quantizer is None:
            return dense_weight(self._stack((module,), in_features), self._kernels)
        cached = self._cached(module, in_features)
        if cached is not None:
            self.quantized.add(cached, is_cached=True)
            return with_outliers(cached, self._policy.int8_threshold)
        # Rounded to the compute dtype first, as transformers does.
        matrix = self._full(module, in_features).to(device=self._device, dtype=self._dtype)
        weight = quantizer.quantize(matrix, dtype=self._dtype)
        self.quantized.add(weight, is_cached=False)
        if self._cache is not None:
            self._cache.add(module.path, weight)
        return with_outliers(weight, self._policy.int8_threshold)

    def _cached(self, module: ModuleLayout, in_features: int) -> Weight | None:
        if self._cache is None:
            return None
        return self._cache.read(module.path, (module.rows, in_features), dtype=self._dtype, device=self._device)

    def _stack(self, modules: Sequence[ModuleLayout], in_features: int, share: MatrixShare | None = None) -> Tensor:
        """Matrices one under the other, copied out of the file: a file that is later truncated cannot hurt.

        Args:
            share: the part that is wanted.
        """
        columns = Part(start=0, stop=in_features) if share is None or share.columns is None else share.columns
        shape = (sum(module.rows for module in modules), columns.stop - columns.start)
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for module in modules:
            full = self._full(module, in_features)
            stacked[start : start + module.rows].copy_(full[:, columns.start : columns.stop])
            start += module.rows
        if share is None or share.columns is not None:
            return stacked
        return torch.cat([stacked[part.start : part.stop] for part in share.rows])

    def _full(self, module: ModuleLayout, in_features: int) -> Tensor:
        return self._stored.full(module, in_features, dtype=self._dtype, device=self._device)


def _cut_parts(parts: Sequence[Weight], share: MatrixShare) -> list[Weight]:
    """A share of the matrix that these are stacked to, which lets go of the rest."""
    if share.columns is not None:
        return [part.column_part(share.columns.start, share.columns.stop) for part in parts]
    kept: list[Weight] = []
    for rows in share.rows:
        start = 0
        for part in parts:
            stop = start + part.shape[0]
            if (own := rows.within(start, stop)) is not None:
                kept.append(with_own_memory(part.part(own.start, own.stop)))
            start = stop
    return kept
