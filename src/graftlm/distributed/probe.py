"""How fast a worker is: a product as its layers have it, timed where they will be."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from graftlm.models.layout import ModelLayout

# Rows of a step that decodes for several requests.
NUM_ROWS = 16
# Of the matrix: more than most caches hold, and a product with it is over before others get their turn on the core.
MATRIX_BYTES = 8 << 20
# All repeats together: some of them are not disturbed.
TOTAL_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Products of `NUM_ROWS` rows with a matrix of `MATRIX_BYTES`. in_features: how wide both are."""

    in_features: int
    dtype: torch.dtype

    @staticmethod
    def of(layout: ModelLayout, dtype: torch.dtype) -> Probe:
        """As wide as what the first layer computes with."""
        return Probe(in_features=max(each.in_features for each in layout.layers[0].linears.values()), dtype=dtype)

    def seconds(self) -> float:
        """The shortest that there was."""
        out_features = max(1, MATRIX_BYTES // (self.in_features * self.dtype.itemsize))
        rows = torch.ones((NUM_ROWS, self.in_features), dtype=self.dtype)
        matrix = torch.ones((out_features, self.in_features), dtype=self.dtype)
        shortest, end = float("inf"), time.perf_counter() + TOTAL_SECONDS
        while (begun := time.perf_counter()) < end:
            rows @ matrix.T
            shortest = min(shortest, time.perf_counter() - begun)
        return shortest
