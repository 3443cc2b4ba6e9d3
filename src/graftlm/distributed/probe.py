"""How fast a worker is: a product as its layers have it, timed where they will be."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from graftlm.models.layout import ModelLayout

# Rows of a step that decodes for several requests.
NUM_ROWS = 16
REPEATS = 5
# Of the matrix; more tells nothing new.
MAX_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A product with a matrix [out_features, in_features]."""

    in_features: int
    out_features: int
    dtype: torch.dtype

    @staticmethod
    def of(layout: ModelLayout, dtype: torch.dtype) -> Probe:
        """The largest product of the first layer, or as much of it as `MAX_BYTES` hold."""
        linears = layout.layers[0].linears.values()
        sizes = [(linear.in_features, sum(module.rows for module in linear.modules)) for linear in linears]
        in_features, out_features = max(sizes, key=lambda size: size[0] * size[1])
        most = max(1, MAX_BYTES // (in_features * dtype.itemsize))
        return Probe(in_features=in_features, out_features=min(out_features, most), dtype=dtype)

    def seconds(self) -> float:
        """The shortest of `REPEATS`."""
        rows = torch.ones((NUM_ROWS, self.in_features), dtype=self.dtype)
        matrix = torch.ones((self.out_features, self.in_features), dtype=self.dtype)
        return min(_timed(rows, matrix) for _ in range(REPEATS))


def _timed(rows: torch.Tensor, matrix: torch.Tensor) -> float:
    begun = time.perf_counter()
    rows @ matrix.T
    return time.perf_counter() - begun
