"""Everything a job needs to go on as if it had never stopped."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftlm.errors import ConfigurationError, TrainingFailed
from graftlm.training.atomic_file import write_atomically
from graftlm.training.output import CHECKPOINT_NAME


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """settings: what the job was started with, and on which base. step: updates made. num_tokens: of their documents.
    optimizer: AdamW's state. best_loss, num_worse: of the measurements so far."""

    settings: Mapping[str, Any]
    step: int
    num_tokens: int
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    best_loss: float | None
    num_worse: int


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Raises: TrainingFailed: it cannot be written; the one before it is intact."""
    # Not straight to the file: of a full disk torch says only that a position is unexpected.
    content = io.BytesIO()
    torch.save(dict(vars(checkpoint)), content)
    try:
        write_atomically(folder / CHECKPOINT_NAME, lambda path: path.write_bytes(content.getbuffer()))
    except OSError as cause:
        raise TrainingFailed(
            "the checkpoint cannot be written", got=str(cause)[:200], do="resume from the one before, which is intact"
        ) from cause


def load_checkpoint(folder: Path, settings: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of a job with these settings.

    Raises:
        ConfigurationError: it cannot be read, or is of other settings; the message lists which.
    """
    path = folder / CHECKPOINT_NAME
    try:
        checkpoint = Checkpoint(**torch.load(path, weights_only=True))
    except Exception as cause:  # a damaged file makes torch raise almost anything
        raise ConfigurationError("the checkpoint cannot be read", got=f"{path}: {str(cause)[:200]}") from cause
    names = sorted(checkpoint.settings.keys() | settings.keys())
    differences = [
        f"{name}: {checkpoint.settings.get(name)!r} then, {settings.get(name)!r} now"
        for name in names
        if checkpoint.settings.get(name) != settings.get(name)
    ]
    if differences:
        raise ConfigurationError("the checkpoint is of other settings", got="; ".join(differences))
    return checkpoint
