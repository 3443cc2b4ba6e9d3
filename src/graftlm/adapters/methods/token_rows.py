"""Rows of the embedding and the head that an adapter has its own values for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.layers.patch import ReplacedRows
from graftlm.models.base_weights import BaseWeights

# What PEFT calls them beside a LoRA.
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"


def token_rows(token_ids: Sequence[int], values: Tensor, base: BaseWeights) -> ReplacedRows:
    """values: [n, E], one row for each id, in their order; of an id that comes twice the last one counts."""
    last = {token_id: index for index, token_id in enumerate(token_ids)}
    order = sorted(last)
    picked = values[torch.tensor([last[token_id] for token_id in order])]
    return ReplacedRows(
        ids=torch.tensor(order, dtype=torch.int64, device=base.device), values=picked.to(base.device, base.dtype)
    )
