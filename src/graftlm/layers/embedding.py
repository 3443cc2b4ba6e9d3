"""Token embedding, with rows, tables and low-rank updates of adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.layers.patch import EmbeddingPatch, ReplacedRows, Segment
from graftlm.quantization import Weight


class Embedding:
    """Rows of a [V, E] table, which may be the output head's weight too."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """token_ids: [T] int64 -> [T, E]. Ids beyond the base's table are those of an adapter with more rows."""
        patched = [(segment, patch) for segment in segments if (patch := segment.patch.embedding) is not None]
        if not patched:
            return self.weight.rows(token_ids)
        out = self.weight.rows(token_ids.clamp(max=self.weight.shape[0] - 1))
        for segment, patch in patched:
            span = slice(segment.start, segment.stop)
            out[span] = _embed(out[span], token_ids[span], patch)
        return out


def _embed(base: Tensor, token_ids: Tensor, patch: EmbeddingPatch) -> Tensor:
    out = base if patch.table is None else patch.table[token_ids]
    if patch.shrink is not None and patch.expand is not None:
        update = patch.shrink[token_ids] @ patch.expand
        exact = out.float() + update
        out = (exact if patch.scale is None else exact * patch.scale).to(base.dtype)
    return out if patch.rows is None else _replace(out, token_ids, patch.rows)


def _replace(out: Tensor, token_ids: Tensor, rows: ReplacedRows) -> Tensor:
    where = torch.searchsorted(rows.ids, token_ids).clamp(max=len(rows.ids) - 1)
    replaced = rows.ids[where] == token_ids
    return torch.where(replaced[:, None], rows.values[where], out)
