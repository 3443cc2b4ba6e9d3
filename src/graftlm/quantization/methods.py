"""The formats by config.json's quant_method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftlm.errors import CheckpointError
from graftlm.quantization.awq import AWQFormat
from graftlm.quantization.bitsandbytes import BitsAndBytesConfig, bitsandbytes_format
from graftlm.quantization.compressed_tensors import CompressedTensorsFormat
from graftlm.quantization.format import FormatReader, WeightFormat
from graftlm.quantization.fp8 import FP8Format
from graftlm.quantization.gguf import read_gguf_format
from graftlm.quantization.gptq import GPTQFormat
from graftlm.quantization.mxfp4 import MXFP4Format

QUANTIZATION_METHODS: dict[str, FormatReader] = {
    "awq": AWQFormat,
    "bitsandbytes": bitsandbytes_format,
    "compressed-tensors": CompressedTensorsFormat,
    "fbgemm_fp8": FP8Format,
    "fp8": FP8Format,
    "gguf": read_gguf_format,
    "gptq": GPTQFormat,
    "mxfp4": MXFP4Format,
}


def read_quantization_config(config: Mapping[str, Any]) -> WeightFormat:
    """The format that config.json's `quantization_config` describes.

    Raises:
        CheckpointError: its quant_method is unknown, or one of its values is refused.
    """
    method = config.get("quant_method")
    reader = QUANTIZATION_METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise CheckpointError(
            "quantization_config.quant_method is unknown",
            got=repr(method)[:100],
            allowed=", ".join(sorted(QUANTIZATION_METHODS)),
        )
    return reader(config)


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """The name in `quantization=` that makes what a `quantization_config` describes; None where no quantiser does."""
    return BitsAndBytesConfig.parse(config).quantization if config.get("quant_method") == "bitsandbytes" else None
