"""The base model in memory, as serving and training both need it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.errors import CheckpointError, ConfigurationError
from graftlm.models.build import build_decoder
from graftlm.models.decoder import Decoder
from graftlm.models.quantized_cache import open_quantized_cache
from graftlm.quantization.policy import choose_policy
from graftlm.text import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A decoder with its tokenizer.

    end_token_ids: ids that end an answer. folder: of the tokenizer's files; None when they are in a GGUF file.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    end_token_ids: frozenset[int]
    folder: Path | None


def load_base(config: EngineConfig) -> Base:
    """Read the model a config names, in its dtype, on its device.

    Raises:
        ConfigurationError: an option cannot be met here.
        CheckpointError: the model cannot be read.
    """
    device = _choose_device(config.device)
    checkpoint = open_checkpoint(config.model)
    policy = choose_policy(
        config.quantization,
        stored=checkpoint.quantization_config,
        quantize_head=config.quantize_head,
        skipped=config.quantize_skip,
        requantize=config.requantize,
    )
    dtype = _choose_dtype(config.dtype, checkpoint)
    cache = None
    if config.quantization_cache:
        cache = open_quantized_cache(checkpoint, policy, dtype=dtype, device=device)
    decoder = build_decoder(checkpoint, dtype=dtype, device=device, policy=policy, cache=cache)
    folder, gguf_file = checkpoint.tokenizer_files
    tokenizer = load_tokenizer(folder, gguf_file)
    _compare_vocabularies(decoder, tokenizer)
    end_token_ids = _end_token_ids(checkpoint, tokenizer)
    checkpoint.close()
    return Base(
        decoder=decoder,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids,
        folder=folder if gguf_file is None else None,
    )


def _choose_device(name: str) -> torch.device:
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


def _choose_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    wanted = checkpoint.dtype if name == "auto" else name
    if wanted not in _DTYPES:
        raise CheckpointError(
            "the checkpoint is saved in a dtype Graft does not compute in",
            got=wanted,
            allowed=", ".join(_DTYPES),
            do="choose one of these as dtype",
        )
    return _DTYPES[wanted]


def _compare_vocabularies(decoder: Decoder, tokenizer: Tokenizer) -> None:
    """More rows than tokens are padding, and common. Tokens without a row are refused where a prompt has one: files
    whose tokenizer got a padding token that the model never saw are common too."""
    if len(tokenizer) > decoder.vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model rows for %d: prompts with the others are refused",
            len(tokenizer),
            decoder.vocab_size,
        )


def _end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer, as transformers' generate takes them: generation_config.json's, else config.json's;
    the tokenizer's when neither names any."""
    for config in (checkpoint.generation_config, checkpoint.config):
        ids: Any = config.get("eos_token_id")
        if ids is not None and ids != []:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset() if tokenizer.eos_token_id is None else frozenset({tokenizer.eos_token_id})
