"""Cross-entropy of packed documents, and its gradients, without ever holding all logits."""

from __future__ import annotations

from collections.abc import Sequence

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


@torch.no_grad()
def losses(decoder: Decoder, packed: PackedBatch) -> list[Tensor]:
    """Of each share, the sum over its targets of their negative log-probability: scalars, float32 or float64."""
    hidden = decoder.hidden(packed.batch, packed.key_values)
    return [
        torch.stack([
            _chunk_loss(decoder, hidden.index_select(0, targets.rows[chunk]), targets.token_ids[chunk], targets.patch)
            for chunk in _chunks(decoder, targets)
        ]).sum()
        for targets in packed.targets
    ]  # fmt: skip


def backward(decoder: Decoder, packed: PackedBatch, divisors: Sequence[int], *, recompute_layers: bool) -> list[Tensor]:
    """Add to the parameters' gradients those of each share's loss over its divisor; the losses, as `losses`.

    The logits of a chunk are made, taken the gradient of, and dropped, before the next: nothing is computed twice, and
    what they leave behind is one gradient as wide as the model per row.

    Args:
        recompute_layers: keep only each layer's input for the backward pass, and compute the layer again there.
    """
    hidden = decoder.hidden(packed.batch, packed.key_values, _recompute_block if recompute_layers else run_block)
    sums, outputs, gradients = [], [], []
    for targets, divisor in zip(packed.targets, divisors, strict=True):
        rows = hidden.index_select(0, targets.rows)
        gradient = torch.empty_like(rows, requires_grad=False)
        total = rows.new_zeros((), dtype=torch.float64)
        for chunk in _chunks(decoder, targets):
            leaf = rows.detach()[chunk].requires_grad_(rows.requires_grad)
            loss = _chunk_loss(decoder, leaf, targets.token_ids[chunk], targets.patch)
            # Of the graph only what made the patch is used again; the rest goes when `loss` does.
            torch.autograd.backward(loss / divisor, retain_graph=True)
            if leaf.grad is not None:
                gradient[chunk] = leaf.grad
            total += loss.detach()
        sums.append(total)
        if rows.requires_grad:
            outputs.append(rows)
            gradients.append(gradient)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return sums


def _chunks(decoder: Decoder, targets: Targets) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // decoder.vocab_size)
    return [slice(start, start + step) for start in range(0, len(targets.rows), step)]


def _recompute_block(block: Block, hidden: Tensor, step: DecoderStep) -> Tensor:
    result: Tensor = checkpoint(block, hidden, step, use_reentrant=False, preserve_rng_state=False)
    return result


def _chunk_loss(decoder: Decoder, rows: Tensor, token_ids: Tensor, patch: ModelPatch) -> Tensor:
    logits = decoder.logits(rows, [Segment(start=0, stop=len(rows), patch=patch)])
    return functional.cross_entropy(logits, token_ids, reduction="sum")
