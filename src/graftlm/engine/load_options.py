"""What a config's words for device, dtype and quantisation mean for a checkpoint on this machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from graftlm.checkpoint import Checkpoint
from graftlm.config import EngineConfig
from graftlm.errors import CheckpointError, ConfigurationError
from graftlm.models.stored_weights import stored_quantization
from graftlm.quantization.methods import quantization_of
from graftlm.quantization.policy import LoadPolicy, choose_policy

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Raises ConfigurationError: it is no device, or not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as cause:
        raise ConfigurationError("this is not a device", got=name, allowed="auto, cpu, cuda, cuda:0, …") from cause
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            "device is none that Graft computes on", got=name, allowed="auto, cpu, cuda, cuda:0, …"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigurationError(
            "device is a CUDA device that torch does not see",
            got=name,
            allowed=f"{count} of them",
            do="use device='cpu'",
        )
    return device


def choose_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    """Raises CheckpointError: "auto", and the checkpoint is in a dtype that is not computed in."""
    wanted = checkpoint.dtype if name == "auto" else name
    if wanted not in _DTYPES:
        raise CheckpointError(
            "the checkpoint is saved in a dtype Graft does not compute in",
            got=wanted,
            allowed=", ".join(_DTYPES),
            do="choose one of these as dtype",
        )
    return _DTYPES[wanted]


def load_policy(config: EngineConfig, checkpoint: Checkpoint) -> LoadPolicy:
    """
    Raises:
        ConfigurationError: the checkpoint is already quantised, and not so; or `int8_threshold` without int8.
        CheckpointError: it is quantised in a way that is not read.
    """
    stored = stored_quantization(checkpoint)
    policy = choose_policy(
        config.quantization,
        stored=stored,
        quantize_head=config.quantize_head,
        skipped=config.quantize_skip,
        requantize=config.requantize,
    )
    kept = quantization_of(stored) if policy.keep_stored and stored is not None else policy.quantization
    if config.int8_threshold is not None and kept != "int8":
        raise ConfigurationError(
            "int8_threshold is about int8 weights, and the linear layers are held otherwise",
            got=kept or "full precision, or another format",
            do="set quantization to int8, or leave int8_threshold out",
        )
    return replace(policy, int8_threshold=config.int8_threshold)
