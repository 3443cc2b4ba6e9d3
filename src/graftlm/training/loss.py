"""Negative log-probabilities of packed documents, and gradients, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graftlm.layers.block import Block, run_block
from graftlm.layers.patch import ModelPatch, Segment
from graftlm.layers.step import DecoderStep
from graftlm.models.decoder import Decoder
from graftlm.training.packed_batch import PackedBatch, Targets

# Logits that exist at a time: 16 MB in float32, of which a backward pass needs a few copies.
CHUNK_ELEMENTS = 1 << 22

# From a share's negative log-probabilities, [documents] float64, to what the gradient of each is multiplied by.
Slopes = Callable[[Tensor], Tensor]


@torch.no_grad()
def document_losses(decoder: Decoder, packed: PackedBatch) -> list[Tensor]:
    """Of each share, its documents' negative log-probabilities: sums over their targets, [documents] float64."""
    hidden = decoder.hidden(packed.batch, packed.key_values)
    return [_document_losses(decoder, hidden.index_select(0, targets.rows), targets) for targets in packed.targets]


def backward(
    decoder: Decoder, packed: PackedBatch, slopes: Sequence[Slopes | float], *, recompute_layers: bool
) -> list[Tensor]:
    """Add to the parameters' gradients those of sum(slope * loss) over each share's documents; the losses, as
    `document_losses`.

    The logits of a chunk are made, taken the gradient of, and dropped, before the next: what they leave behind is one
    gradient as wide as the model per row. Nothing is computed twice, but for slopes that depend on the losses: the
    logits are then made once before.

    Args:
        slopes: of each share; one number for all of its documents, or a function of its losses.
        recompute_layers: keep only each layer's input for the backward pass, and compute the layer again there.
    """
    hidden = decoder.hidden(packed.batch, packed.key_values, _recompute_block if recompute_layers else run_block)
    losses, outputs, gradients = [], [], []
    for targets, slope in zip(packed.targets, slopes, strict=True):
        rows = hidden.index_select(0, targets.rows)
        if callable(slope):
            factors = slope(_document_losses(decoder, rows, targets))
        else:
            factors = torch.full((targets.num_documents,), slope, dtype=torch.float64, device=rows.device)
        factors = factors[targets.documents]
        gradient = torch.empty_like(rows, requires_grad=False)
        total = rows.new_zeros(targets.num_documents, dtype=torch.float64)
        for chunk in _chunks(decoder, targets):
            leaf = rows.detach()[chunk].requires_grad_(rows.requires_grad)
            loss = _token_losses(decoder, leaf, targets.token_ids[chunk], targets.patch)
            # Of the graph only what made the patch is used again; the rest goes when `loss` does.
            torch.autograd.backward((loss * factors[chunk].to(loss.dtype)).sum(), retain_graph=True)
            if leaf.grad is not None:
                gradient[chunk] = leaf.grad
            total.index_add_(0, targets.documents[chunk], loss.detach().double())
        losses.append(total)
        if rows.requires_grad:
            outputs.append(rows)
            gradients.append(gradient)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return losses


@torch.no_grad()
def _document_losses(decoder: Decoder, rows: Tensor, targets: Targets) -> Tensor:
    total = rows.new_zeros(targets.num_documents, dtype=torch.float64)
    for chunk in _chunks(decoder, targets):
        loss = _token_losses(decoder, rows[chunk], targets.token_ids[chunk], targets.patch)
        total.index_add_(0, targets.documents[chunk], loss.double())
    return total


def _chunks(decoder: Decoder, targets: Targets) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // decoder.vocab_size)
    return [slice(start, start + step) for start in range(0, len(targets.rows), step)]


def _recompute_block(block: Block, hidden: Tensor, step: DecoderStep) -> Tensor:
    result: Tensor = checkpoint(block, hidden, step, use_reentrant=False, preserve_rng_state=False)
    return result


def _token_losses(decoder: Decoder, rows: Tensor, token_ids: Tensor, patch: ModelPatch) -> Tensor:
    logits = decoder.logits(rows, [Segment(start=0, stop=len(rows), patch=patch)])
    return functional.cross_entropy(logits, token_ids, reduction="none")
