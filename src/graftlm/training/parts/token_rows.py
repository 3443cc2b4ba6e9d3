"""Rows of single tokens, trained apart from all others: PEFT's `trainable_token_indices`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graftlm.adapters.methods.token_rows import TOKEN_ROWS, token_rows
from graftlm.adapters.patch_builder import PatchBuilder
from graftlm.models.base_weights import BaseWeights
from graftlm.training.dropout import Dropout
from graftlm.training.parts.part import ParameterKey


class TokenRowsPart:
    """token_ids: of each end of the model that has rows of its own, the embedding or the head. reaches_head: the
    embedding's rows are the head's too."""

    def __init__(self, token_ids: Mapping[str, Sequence[int]], base: BaseWeights, *, reaches_head: bool) -> None:
        self._token_ids = token_ids
        self._base = base
        self._reaches_head = reaches_head

    def fresh(self, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
        """The base's own rows."""
        sites = self._base.sites
        values: dict[ParameterKey, Tensor] = {}
        for path, ids in self._token_ids.items():
            is_embedding = path == sites.embedding_path
            table = self._base.embedding() if is_embedding else self._base.linear(path).dequantize()
            values[ParameterKey(path, TOKEN_ROWS)] = table[torch.tensor(ids, device=table.device)]
        return values

    def add_to(
        self, builder: PatchBuilder, values: Mapping[ParameterKey, Tensor], dropout: Dropout | None = None
    ) -> None:
        sites = self._base.sites
        for path, ids in self._token_ids.items():
            rows = token_rows(ids, values[ParameterKey(path, TOKEN_ROWS)], self._base)
            if path == sites.embedding_path:
                builder.replace_embedding_rows(rows)
            if path == sites.head_path or self._reaches_head:
                builder.replace_head_rows(rows)
