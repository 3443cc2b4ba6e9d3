"""A model read, calibrated, written with eight-bit weights and inputs, and measured as it was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from graftlm.calibration.largest_inputs import find_largest_inputs
from graftlm.calibration.text import CalibrationText, read_calibration_text
from graftlm.checkpoint import open_checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.base import load_base
from graftlm.layers.patch import ModelPatch
from graftlm.models.decoder import Decoder
from graftlm.models.quantized_export import check_quantizable, export_quantized
from graftlm.models.read import read_spec
from graftlm.quantization.policy import LoadPolicy
from graftlm.quantization.written import w8a8_format
from graftlm.text import load_tokenizer
from graftlm.training.document import Document
from graftlm.training.loss import document_losses
from graftlm.training.packed_batch import PackedBatch, Share, pack


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """perplexity_before, perplexity_after: of the model that was read and of the one that was written, each in its own
    dtype, on `text.held_out`. largest_inputs: of every linear module that is not skipped, by path."""

    text: CalibrationText
    largest_inputs: dict[str, float]
    perplexity_before: float
    perplexity_after: float


def quantize_calibrated(
    model: str | Path, folder: Path, text: Path, *, skipped: Sequence[str] = (), requantize: bool = False
) -> CalibrationReport:
    """Write `model` to `folder` with static eight-bit inputs, in compressed-tensors' int-quantized layout.

    An input's scale is its largest magnitude over the calibration text: nothing that was seen is cut off, above all not
    the few huge values that attention rests on. It is found through the layers that serve.

    Args:
        text: in UTF-8; see `read_calibration_text`.
        folder, skipped, requantize: as in `export_quantized`.

    Raises:
        CheckpointError, ConfigurationError: as `export_quantized`, `read_calibration_text` and `find_largest_inputs`.
    """
    checkpoint = open_checkpoint(model)
    try:
        check_quantizable(checkpoint, folder, w8a8_format({}), skipped=skipped, requantize=requantize)
        _, spec = read_spec(checkpoint)
        read = read_calibration_text(
            text,
            load_tokenizer(checkpoint.tokenizer_source),
            max_len=spec.max_position_embeddings,
            vocab_size=spec.vocab_size,
        )
        base = load_base(EngineConfig(model=model))
        largest = find_largest_inputs(base.decoder, _batches(base.decoder, read.calibration))
        before = perplexity(base.decoder, read.held_out)
        # The written model is measured by itself: two do not have to fit into memory.
        del base
        export_quantized(checkpoint, folder, w8a8_format(largest), skipped=skipped, requantize=requantize)
    finally:
        checkpoint.close()
    policy = LoadPolicy(skipped=tuple(skipped))
    quantised = {path: value for path, value in largest.items() if not policy.skips(path)}
    after = perplexity(load_base(EngineConfig(model=folder)).decoder, read.held_out)
    return CalibrationReport(text=read, largest_inputs=quantised, perplexity_before=before, perplexity_after=after)


def perplexity(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of all tokens but each sequence's first."""
    total = sum(
        float(loss.sum()) for packed in _batches(decoder, sequences) for loss in document_losses(decoder, packed)
    )
    mean = total / sum(len(sequence) - 1 for sequence in sequences)
    return float(torch.tensor(mean, dtype=torch.float64).exp())


def _batches(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> Iterator[PackedBatch]:
    """One sequence each: nothing depends on how they are packed, and memory stays small."""
    for sequence in sequences:
        document = Document(token_ids=tuple(sequence), learnt=(True,) * len(sequence))
        yield pack([Share(patch=ModelPatch(), documents=(document,))], decoder)
