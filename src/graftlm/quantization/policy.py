"""What becomes of a checkpoint's matrices when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.config import Quantization
from graftlm.errors import ConfigurationError
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.format import Quantizer
from graftlm.quantization.methods import quantization_of


@dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """How linear layers are held in memory. Without arguments: as they are stored.

    quantizer: what they are quantised with; None for not at all.
    keep_stored: whether a matrix that is stored quantised stays so; else it is dequantised first.
    quantize_head: whether the output head is quantised too, and the token table where they are one matrix.
    """

    quantizer: Quantizer | None = None
    keep_stored: bool = True
    quantize_head: bool = False


def choose_policy(
    quantization: Quantization | None,
    *,
    stored: Mapping[str, Any] | None,
    quantize_head: bool = False,
    requantize: bool = False,
) -> LoadPolicy:
    """The policy for one checkpoint.

    Args:
        quantization, quantize_head, requantize: as in `EngineConfig`.
        stored: the checkpoint's `quantization_config`.

    Raises:
        ConfigurationError: the checkpoint is already quantised, and not so.
    """
    if quantization is None:
        return LoadPolicy()
    if quantization == "none":
        return LoadPolicy(keep_stored=False)
    if stored is not None and not requantize:
        own = quantization_of(stored) or str(stored.get("quant_method"))
        if own != quantization:
            raise ConfigurationError(
                "the checkpoint is already quantised, and to something else than was asked for",
                got=f"quantization={quantization!r} for a checkpoint in {own}",
                do="leave quantization out to serve it as it is, or add requantize, and both errors add up",
            )
        if quantize_head:
            raise ConfigurationError(
                "the checkpoint is already quantised, its head included or not", do="leave quantize_head out"
            )
        return LoadPolicy()
    return LoadPolicy(quantizer=QUANTIZERS[quantization], keep_stored=False, quantize_head=quantize_head)
