"""Negative log-probabilities of packed documents, and gradients, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graftlm.layers.block import Block, run_blocks
from graftlm.layers.segments import Segments
from graftlm.layers.step import DecoderStep
from graftlm.models.decoder import Decoder
from graftlm.training.packed_batch import PackedBatch, Targets, join

# Logits that exist at a time: 8 MB in float32, of which a backward pass needs a few copies.
CHUNK_ELEMENTS = 1 << 21

# From a share's negative log-probabilities, [documents] float64, to what the gradient of each is multiplied by.
Slopes = Callable[[Tensor], Tensor]


@torch.no_grad()
def document_losses(decoder: Decoder, packed: PackedBatch) -> list[Tensor]:
    """Of each share, its documents' negative log-probabilities: sums over their targets, [documents] float64."""
    hidden = decoder.hidden(packed.batch, packed.key_values)
    return _by_share(_document_losses(decoder, hidden, join(packed.targets)), packed)


def backward(
    decoder: Decoder, packed: PackedBatch, slopes: Sequence[Slopes | float], *, recompute_layers: bool
) -> list[Tensor]:
    """Add to the parameters' gradients those of sum(slope * loss) over each share's documents; the losses, as
    `document_losses`.

    The logits of a chunk, which may be of several shares, are made, taken the gradient of, and dropped, before the
    next: what they leave behind is one gradient as wide as the model per row. Nothing is computed twice, but for slopes
    that depend on the losses: the logits are then made once before.

    Args:
        slopes: of each share; one number for all of its documents, or a function of its losses.
        recompute_layers: keep only each layer's input for the backward pass, and compute the layer again there.
    """
    hidden = decoder.hidden(packed.batch, packed.key_values, _recompute_blocks if recompute_layers else run_blocks)
    targets = join(packed.targets)
    slope_of_document = torch.cat(
        [
            slope(_document_losses(decoder, hidden, own))
            if callable(slope)
            else torch.full((own.num_documents,), slope, dtype=torch.float64, device=hidden.device)
            for own, slope in zip(packed.targets, slopes, strict=True)
        ]
    )
    factors = slope_of_document[targets.documents]
    rows = hidden.index_select(0, targets.rows)
    gradient = torch.empty_like(rows, requires_grad=False)
    total = rows.new_zeros(targets.num_documents, dtype=torch.float64)
    for chunk in _chunks(decoder, targets):
        leaf = rows.detach()[chunk].requires_grad_(rows.requires_grad)
        logits = _logits(decoder, leaf, targets, chunk)
        # Cross entropy's gradient is softmax less one at the target. Autograd would make three more such matrices.
        slope = functional.log_softmax(logits.detach(), dim=1)
        token_ids = targets.token_ids[chunk, None]
        loss = -slope.gather(1, token_ids)[:, 0]
        slope.exp_().scatter_add_(1, token_ids, slope.new_full(token_ids.shape, -1.0))
        slope *= factors[chunk, None].to(slope.dtype)
        # Of the graph only what made the patches is used again; the rest goes when `logits` does.
        torch.autograd.backward(logits, slope, retain_graph=True)
        del logits, slope
        if leaf.grad is not None:
            gradient[chunk] = leaf.grad
        total.index_add_(0, targets.documents[chunk], loss.double())
    if rows.requires_grad:
        torch.autograd.backward(rows, gradient)
    return _by_share(total, packed)


def _by_share(losses: Tensor, packed: PackedBatch) -> list[Tensor]:
    return list(torch.split(losses, [own.num_documents for own in packed.targets]))


@torch.no_grad()
def _document_losses(decoder: Decoder, hidden: Tensor, targets: Targets) -> Tensor:
    rows = hidden.index_select(0, targets.rows)
    total = rows.new_zeros(targets.num_documents, dtype=torch.float64)
    for chunk in _chunks(decoder, targets):
        logits = _logits(decoder, rows[chunk], targets, chunk)
        loss = functional.cross_entropy(logits, targets.token_ids[chunk], reduction="none")
        total.index_add_(0, targets.documents[chunk], loss.double())
    return total


def _chunks(decoder: Decoder, targets: Targets) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // decoder.vocab_size)
    count = len(targets.rows)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _recompute_blocks(blocks: Sequence[Block], hidden: Tensor, step: DecoderStep) -> Tensor:
    """Each layer again in the backward pass."""
    for block in blocks:
        hidden = checkpoint(block, hidden, step, use_reentrant=False, preserve_rng_state=False)
    return hidden


def _logits(decoder: Decoder, rows: Tensor, targets: Targets, chunk: slice) -> Tensor:
    """Of a chunk's rows, [chunk, E] -> [chunk, V]."""
    segments = Segments(
        segment.head_part(chunk.start, chunk.stop)
        for segment in targets.segments
        if segment.start < chunk.stop and segment.stop > chunk.start
    )
    return decoder.logits(rows, segments)
