"""Token tables and output heads of which each rank has some of the rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.kernels.grouped_codes import GroupedCodes
from graftlm.layers.collective import Collective
from graftlm.quantization import DenseWeight, Weight


class VocabularyParallelWeight:
    """A `Weight` whose rows are shared out among ranks, which all call the same methods at the same time.

    own: this rank's rows. bounds: of each rank's rows, [start, stop) in the whole.
    Source: Megatron-LM, arXiv 1909.08053.
    """

    def __init__(self, own: Weight, bounds: tuple[tuple[int, int], ...], collective: Collective) -> None:
        self._own = own
        self._bounds = bounds
        self._collective = collective
        self._start, self._stop = bounds[collective.rank]

    @property
    def shape(self) -> tuple[int, int]:
        return self._bounds[-1][1], self._own.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of this rank's rows."""
        return self._own.num_bytes

    @property
    def format(self) -> str:
        return self._own.format

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        own = self._own.matmul(x, None if bias is None else bias[self._start : self._stop])
        return torch.cat(self._gathered(own.t()), dim=0).t().contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        is_own = (ids >= self._start) & (ids < self._stop)
        rows = self._own.rows((ids - self._start).clamp(0, self._stop - self._start - 1))
        return self._collective.all_reduce(torch.where(is_own[:, None], rows, torch.zeros((), dtype=rows.dtype)))

    def part(self, start: int, stop: int) -> Weight:
        """A copy, in full precision."""
        return DenseWeight(self.dequantize()[start:stop])

    def column_part(self, start: int, stop: int) -> Weight:
        """A copy, in full precision."""
        return DenseWeight(self.dequantize()[:, start:stop].contiguous())

    def grouped_codes(self) -> GroupedCodes | None:
        return None

    def dequantize(self) -> Tensor:
        return torch.cat(self._gathered(self._own.dequantize()))

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's rows, of which some have one more than others."""
        most = max(stop - start for start, stop in self._bounds)
        padded = functional.pad(own, (0, 0, 0, most - own.shape[0])).contiguous()
        gathered = self._collective.all_gather(padded)
        return [rows[: stop - start] for rows, (start, stop) in zip(gathered, self._bounds, strict=True)]
