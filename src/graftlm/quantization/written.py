"""What a model can be written as, by the names `graft quantize --to` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.errors import ConfigurationError
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.bitsandbytes.config import quantization_config
from graftlm.quantization.format import Quantizer
from graftlm.quantization.round_to_nearest import RoundToNearest
from graftlm.quantization.w8a8_quantizer import W8A8Quantizer


@dataclass(frozen=True, kw_only=True)
class WrittenFormat:
    """quantizer: path of a linear module -> what makes its weights.

    config: paths of linear modules that stay in full precision, name of the compute dtype -> the
    `quantization_config` with which the weights are read again.
    conv1d: whether modules that transformers keep transposed (GPT-2's Conv1D) have a place in the format.
    """

    quantizer: Callable[[str], Quantizer]
    config: Callable[[Sequence[str], str], dict[str, Any]]
    conv1d: bool = True


def w8a8_format(largest_inputs: Mapping[str, float]) -> WrittenFormat:
    """Eight-bit weights and inputs. largest_inputs: path of a linear module -> largest magnitude of its inputs."""

    def config(skipped_modules: Sequence[str], compute_dtype: str) -> dict[str, Any]:
        return W8A8Quantizer.quantization_config(skipped_modules=skipped_modules)

    return WrittenFormat(
        quantizer=lambda path: W8A8Quantizer(largest_input=largest_inputs[path]), config=config, conv1d=False
    )


def _bitsandbytes(name: str, quantizer: Quantizer) -> WrittenFormat:
    def config(skipped_modules: Sequence[str], compute_dtype: str) -> dict[str, Any]:
        return quantization_config(name, skipped_modules=skipped_modules, compute_dtype=compute_dtype)

    return WrittenFormat(quantizer=lambda path: quantizer, config=config)


def _gptq(rounding: RoundToNearest) -> WrittenFormat:
    def config(skipped_modules: Sequence[str], compute_dtype: str) -> dict[str, Any]:
        return rounding.quantization_config(skipped_modules=skipped_modules)

    return WrittenFormat(quantizer=lambda path: rounding, config=config)


# What `w8a8_format` makes.
CALIBRATED_FORMAT = "w8a8"
# What needs nothing but the weights.
WRITTEN_FORMATS: Mapping[str, WrittenFormat] = {
    **{name: _bitsandbytes(name, quantizer) for name, quantizer in QUANTIZERS.items()},
    "gptq-sym-int4": _gptq(RoundToNearest()),
}


def written_format(name: str) -> WrittenFormat:
    """
    Raises:
        ConfigurationError: there is no such format.
    """
    if name not in WRITTEN_FORMATS:
        raise ConfigurationError(
            "this is no format a model can be written in",
            got=repr(name),
            allowed=", ".join((*WRITTEN_FORMATS, CALIBRATED_FORMAT)),
        )
    return WRITTEN_FORMATS[name]
