"""Inputs that every layer has of its own for each token, besides the hidden state (per-layer embeddings)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from graftlm.layers.batch import RaggedBatch
from graftlm.layers.embedding import Embedding
from graftlm.layers.linear import Linear
from graftlm.layers.norm import Norm
from graftlm.layers.segments import Segments


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """(norm(projection(embedded) / sqrt(E)) + table[token]) / sqrt(2), cut into the layers' parts.

    first_layer, num_layers: for which L layers. table: [V, L * P] rows, with their own factor. projection: E -> L * P.
    norm: over the P numbers of one layer.
    Source: transformers' Gemma4TextModel.
    """

    table: Embedding
    projection: Linear
    norm: Norm
    first_layer: int
    num_layers: int

    def __call__(self, batch: RaggedBatch, embedded: Tensor) -> dict[int, Tensor]:
        """embedded: [T, E], the tokens as the decoder's first layer sees them -> [T, P] for each layer."""
        projected = self.projection(embedded, batch.segments) * embedded.shape[-1] ** -0.5
        parts = (embedded.shape[0], self.num_layers, -1)
        context = self.norm(projected.view(parts), batch.segments)
        tokens = self.table(batch.token_ids, Segments()).view(parts)
        inputs = (context + tokens) * 2.0**-0.5
        return {self.first_layer + index: inputs[:, index] for index in range(self.num_layers)}
