"""Cross-entropy of packed documents, without ever holding all logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graftlm.layers.block import Block, BlockRunner, run_block
from graftlm.layers.patch import ModelPatch, Segment
from graftlm.layers.step import DecoderStep
from graftlm.models.decoder import Decoder
from graftlm.training.packed_batch import PackedBatch, Targets

# Logits that exist at a time: 16 MB in float32, of which the backward pass needs a few copies.
CHUNK_ELEMENTS = 1 << 22


def losses(decoder: Decoder, packed: PackedBatch, *, recompute_layers: bool) -> list[Tensor]:
    """Of each share, the sum over its targets of their negative log-probability: scalars, float32 or float64.

    Args:
        recompute_layers: keep only each layer's input for the backward pass, and compute the layer again there.
    """
    run: BlockRunner = _recompute_block if recompute_layers and torch.is_grad_enabled() else run_block
    hidden = decoder.hidden(packed.batch, packed.key_values, run)
    return [_loss(decoder, hidden, targets) for targets in packed.targets]


def _recompute_block(block: Block, hidden: Tensor, step: DecoderStep) -> Tensor:
    result: Tensor = checkpoint(block, hidden, step, use_reentrant=False, preserve_rng_state=False)
    return result


def _loss(decoder: Decoder, hidden: Tensor, targets: Targets) -> Tensor:
    rows_at_once = max(1, CHUNK_ELEMENTS // decoder.vocab_size)
    sums: list[Tensor] = []
    for start in range(0, len(targets.rows), rows_at_once):
        rows = hidden.index_select(0, targets.rows[start : start + rows_at_once])
        token_ids = targets.token_ids[start : start + rows_at_once]
        if torch.is_grad_enabled():
            part: Tensor = checkpoint(
                _chunk_loss,
                decoder,
                rows,
                token_ids,
                targets.patch,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            sums.append(part)
        else:
            sums.append(_chunk_loss(decoder, rows, token_ids, targets.patch))
    return torch.stack(sums).sum()


def _chunk_loss(decoder: Decoder, rows: Tensor, token_ids: Tensor, patch: ModelPatch) -> Tensor:
    logits = decoder.logits(rows, [Segment(start=0, stop=len(rows), patch=patch)])
    return functional.cross_entropy(logits, token_ids, reduction="sum")
