"""The base model in memory, as serving and training both need it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.checkpoint import Checkpoint, open_checkpoint
from graftlm.config import EngineConfig
from graftlm.engine.load_options import choose_device, choose_dtype, load_policy
from graftlm.errors import ConfigurationError
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.registry import REFERENCE
from graftlm.models.build import build_decoder
from graftlm.models.decoder import Decoder
from graftlm.models.quantized_cache import open_quantized_cache
from graftlm.text import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BaseText:
    """A model's tokenizer, and what its files say of text.

    end_token_ids: ids that end an answer. folder: of the tokenizer's files; None when they are in a GGUF file.
    """

    tokenizer: Tokenizer
    end_token_ids: frozenset[int]
    folder: Path | None


@dataclass(frozen=True, kw_only=True)
class Base(BaseText):
    """A decoder with its tokenizer."""

    decoder: Decoder


def load_base(config: EngineConfig, kernels: Kernels = REFERENCE) -> Base:
    """Read the model a config names, in its dtype, on its device.

    Args:
        kernels: those that lay out its matrices.

    Raises:
        ConfigurationError: an option cannot be met here.
        CheckpointError: the model cannot be read.
    """
    checkpoint = open_checkpoint(config.model)
    decoder = load_decoder(config, checkpoint, kernels)
    text = load_text(checkpoint, decoder.vocab_size)
    checkpoint.close()
    return Base(decoder=decoder, **vars(text))


def load_decoder(config: EngineConfig, checkpoint: Checkpoint, kernels: Kernels = REFERENCE) -> Decoder:
    """All of a checkpoint's layers, as a config wants them.

    Args:
        kernels: those that will compute with them.

    Raises:
        ConfigurationError, CheckpointError
    """
    device, policy = choose_device(config.device), load_policy(config, checkpoint)
    if config.deterministic and device.type != "cpu":
        raise ConfigurationError("deterministic is for the CPU only", got=f"device {device}", do="set device to cpu")
    dtype = choose_dtype(config.dtype, checkpoint)
    cache = None
    if config.quantization_cache:
        cache = open_quantized_cache(checkpoint, policy, dtype=dtype, device=device)
    return build_decoder(checkpoint, dtype=dtype, device=device, policy=policy, cache=cache, kernels=kernels)


def load_text(checkpoint: Checkpoint, vocab_size: int) -> BaseText:
    """A checkpoint's tokenizer. vocab_size: rows of the token table.

    Raises:
        CheckpointError
    """
    source = checkpoint.tokenizer_source
    tokenizer = load_tokenizer(source)
    _compare_vocabularies(vocab_size, tokenizer)
    return BaseText(
        tokenizer=tokenizer,
        end_token_ids=_end_token_ids(checkpoint, tokenizer),
        folder=source if isinstance(source, Path) else None,
    )


def _compare_vocabularies(vocab_size: int, tokenizer: Tokenizer) -> None:
    """More rows than tokens are padding, and common. Tokens without a row are refused where a prompt has one: files
    whose tokenizer got a padding token that the model never saw are common too."""
    if len(tokenizer) > vocab_size:
        logger.warning(
            "the tokenizer has %d tokens, the model rows for %d: prompts with the others are refused",
            len(tokenizer),
            vocab_size,
        )


def _end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer, as transformers' generate takes them: generation_config.json's, else config.json's;
    the tokenizer's when neither names any."""
    for config in (checkpoint.generation_config, checkpoint.config):
        ids: Any = config.get("eos_token_id")
        if ids is not None and ids != []:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset() if tokenizer.eos_token_id is None else frozenset({tokenizer.eos_token_id})
