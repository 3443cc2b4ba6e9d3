"""The folder a job writes: an adapter as PEFT saves it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from graftlm.adapters.files import CONFIG_NAME, SAFETENSORS_NAME
from graftlm.errors import ConfigurationError, TrainingFailed
from graftlm.training.atomic_file import write_atomically

METRICS_NAME = "metrics.jsonl"
CHECKPOINT_NAME = "checkpoint.pt"


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise unless a job can write there.

    Raises:
        ConfigurationError: there is something in it already, or nothing to resume.
    """
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as cause:
        raise ConfigurationError("the output folder cannot be read", got=str(cause)[:200]) from cause
    if resume and not (folder / CHECKPOINT_NAME).is_file():
        raise ConfigurationError("there is no checkpoint to resume from", got=str(folder), do="start without resume")
    if taken and not resume:
        raise ConfigurationError(
            "the output folder exists", got=str(folder), do="choose another, or resume the run that wrote it"
        )


def is_finished(folder: Path) -> bool:
    """Whether a job has written its adapter there and is through."""
    return (folder / CONFIG_NAME).is_file() and not (folder / CHECKPOINT_NAME).exists()


def make_folder(folder: Path) -> None:
    """Raises: ConfigurationError: it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigurationError("the output folder cannot be made", got=str(cause)[:200]) from cause


def save_adapter(folder: Path, config: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Write weights, then config: a folder with both is complete.

    Raises:
        TrainingFailed: a file cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in parameters.items()}
    content = safetensors.torch.save(tensors, metadata={"format": "pt"})
    text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
    try:
        write_atomically(folder / SAFETENSORS_NAME, lambda path: path.write_bytes(content))
        write_atomically(folder / CONFIG_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as cause:
        raise TrainingFailed("the adapter cannot be written", got=str(cause)[:200]) from cause
