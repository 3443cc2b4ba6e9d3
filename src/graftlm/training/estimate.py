"""What a job will take, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from graftlm.engine.base import Base
from graftlm.models.base_weights import DecoderWeights
from graftlm.training.batch_order import BatchOrder
from graftlm.training.loss import CHUNK_ELEMENTS
from graftlm.training.packed_batch import num_rows
from graftlm.training.trainable import TrainableAdapter
from graftlm.training.training import PreparedJob

# Of each parameter: itself, its gradient, and AdamW's two moments.
_COPIES = 4
# Vectors as wide as the model that a layer keeps per row for the backward pass, about.
_KEPT_PER_ROW = 16


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """parameter_bytes: with gradients and AdamW's state. activation_bytes: of the largest batch, roughly; logits_bytes:
    of the loss. num_long: rows longer than allowed."""

    num_modules: int
    num_parameters: int
    parameter_bytes: int
    activation_bytes: int
    logits_bytes: int
    num_documents: int
    num_tokens: int
    num_targets: int
    num_long: int
    num_held_out: int
    steps_per_epoch: float


def estimate(prepared: PreparedJob, base: Base, *, gradient_checkpointing: bool) -> JobEstimate:
    """Count what a job trains and learns from, and estimate its memory beside the base's weights."""
    job, decoder = prepared.job, base.decoder
    trainable = TrainableAdapter(prepared.start, DecoderWeights(decoder), seed=job.seed)
    order = BatchOrder(len(prepared.examples), job.batch_size, shuffle=job.shuffle, seed=job.seed)
    longest = sorted((num_rows(document) for document in prepared.documents), reverse=True)
    rows = sum(longest[: job.batch_size * len(prepared.examples[0])])
    width = decoder.sites.embedding_size * decoder.dtype.itemsize
    kept = 1 if gradient_checkpointing else _KEPT_PER_ROW
    return JobEstimate(
        num_modules=trainable.num_modules,
        num_parameters=trainable.num_parameters,
        parameter_bytes=sum(tensor.nbytes for tensor in trainable.parameters.values()) * _COPIES,
        activation_bytes=rows * width * len(decoder.kv_shapes) * kept,
        logits_bytes=_COPIES * 4 * min(CHUNK_ELEMENTS, rows * decoder.vocab_size),
        num_documents=len(prepared.documents),
        num_tokens=sum(len(document.token_ids) for document in prepared.documents),
        num_targets=sum(len(document.targets) for document in prepared.documents),
        num_long=prepared.data.num_long,
        num_held_out=sum(len(example) for example in prepared.held_out),
        steps_per_epoch=order.batches_per_epoch / job.accumulate,
    )
