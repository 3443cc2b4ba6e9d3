"""Token and position embeddings, with rows, tables and low-rank updates of adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.batch import RaggedBatch
from graftlm.layers.linear import Linear
from graftlm.layers.norm import Norm
from graftlm.layers.patch import EmbeddingPatch, ReplacedRows
from graftlm.layers.segments import Segments
from graftlm.quantization import Weight


class Embedding:
    """Rows of a [V, E] table, which may be the output head's weight too.

    scale: factor of every row, an adapter's rows included; it is rounded to the table's dtype (Gemma). Only an
        adapter's inputs, which are no rows of a table, go without.
    """

    def __init__(self, weight: Weight, scale: float | None = None) -> None:
        self.weight = weight
        self._scale = scale

    def __call__(self, token_ids: Tensor, segments: Segments) -> Tensor:
        """token_ids: [T] int64 -> [T, E]. Ids beyond the base's table are those of an adapter with more rows."""
        patched = [(segment, patch) for segment in segments if (patch := segment.patch.embedding) is not None]
        if not patched:
            return self._scaled(self.weight.rows(token_ids))
        out = self.weight.rows(token_ids.clamp(max=self.weight.shape[0] - 1))
        for segment, patch in patched:
            span = slice(segment.start, segment.stop)
            out[span] = _embed(out[span], token_ids[span], patch)
        out = self._scaled(out)
        for segment, patch in patched:
            if patch.inputs is not None:
                span = slice(segment.start, segment.stop)
                out[span] = _replace(out[span], token_ids[span], patch.inputs)
        return out

    def _scaled(self, rows: Tensor) -> Tensor:
        if self._scale is None:
            return rows
        return rows * torch.tensor(self._scale, dtype=rows.dtype, device=rows.device)


class InputEmbedding:
    """What the first layer sees: token rows, projected to the model's width, plus position rows, normed.

    positions: [P, E], added to each token by its position. position_offset: the row of position 0.
    """

    def __init__(
        self,
        tokens: Embedding,
        *,
        project_in: Linear | None = None,
        positions: Tensor | None = None,
        position_offset: int = 0,
        norm: Norm | None = None,
    ) -> None:
        self.tokens = tokens
        self._project_in = project_in
        self._positions = positions
        self._position_offset = position_offset
        self._norm = norm

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """[T, E]."""
        hidden = self.tokens(batch.token_ids, batch.segments)
        if self._project_in is not None:
            hidden = self._project_in(hidden, batch.segments)
        if self._positions is not None:
            hidden = hidden + self._positions[batch.positions + self._position_offset]
        return hidden if self._norm is None else self._norm(hidden, batch.segments)


def _embed(base: Tensor, token_ids: Tensor, patch: EmbeddingPatch) -> Tensor:
    out = base if patch.table is None else patch.table.rows(token_ids)
    if patch.shrink is not None and patch.expand is not None:
        update = ops.linear(patch.shrink.rows(token_ids), patch.expand.t())
        exact = ops.widened(out) + update
        out = (exact if patch.scale is None else exact * patch.scale).to(base.dtype)
    return out if patch.rows is None else _replace(out, token_ids, patch.rows)


def _replace(out: Tensor, token_ids: Tensor, rows: ReplacedRows) -> Tensor:
    where = torch.searchsorted(rows.ids, token_ids).clamp(max=len(rows.ids) - 1)
    replaced = rows.ids[where] == token_ids
    return torch.where(replaced[:, None], rows.values[where], out)
