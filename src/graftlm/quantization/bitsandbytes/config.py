"""config.json's `quantization_config` as transformers writes it for bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes.quant_state import DTYPES, QUANT_TYPES, STORAGE_DTYPES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BitsAndBytesConfig:
    """What a checkpoint says about itself; its tensors may say otherwise, module by module.

    quantization: a quantiser's name, or None where neither 4 nor 8 bits are asked for.
    """

    quantization: str | None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> BitsAndBytesConfig:
        """Every key transformers knows is checked; null is its default. Those that only matter where bitsandbytes
        itself quantises or multiplies (skip lists, storage and compute dtype, the outlier threshold) are then done
        with.

        Raises:
            CheckpointError: a value that is unknown, by name.
        """
        for key, value in config.items():
            if key not in _FIELDS:
                logger.warning("quantization_config has a key that Graft does not read: %s=%.100r", key, value)
            elif value is not None and not _FIELDS[key].accepts(value):
                raise CheckpointError(
                    f"quantization_config holds an unusable {key}", got=repr(value)[:200], allowed=_FIELDS[key].allowed
                )
        four_bit, eight_bit = (config.get(key, config.get(f"_{key}")) for key in ("load_in_4bit", "load_in_8bit"))
        if four_bit and eight_bit:
            raise CheckpointError(
                "quantization_config asks for two widths at once",
                got="load_in_4bit and load_in_8bit",
                allowed="one of them",
            )
        if four_bit:
            quant_type = config.get("bnb_4bit_quant_type") or "fp4"
            double = config.get("bnb_4bit_use_double_quant")
            return cls(quantization=f"{quant_type}-double" if double else quant_type)
        return cls(quantization="int8" if eight_bit else None)


def quantization_config(quantization: str, *, skipped_modules: Sequence[str], compute_dtype: str) -> dict[str, Any]:
    """The `quantization_config` with which transformers loads what a quantiser made.

    Args:
        quantization: the quantiser's name.
        skipped_modules: paths of the linear modules that stay in full precision, the head among them.
        compute_dtype: such as "bfloat16".
    """
    four_bit = quantization != "int8"
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four_bit,
        "load_in_8bit": not four_bit,
        "llm_int8_skip_modules": list(skipped_modules),
    }
    if four_bit:
        config["bnb_4bit_quant_type"] = quantization.removesuffix("-double")
        config["bnb_4bit_use_double_quant"] = quantization.endswith("-double")
        config["bnb_4bit_quant_storage"] = "uint8"
        config["bnb_4bit_compute_dtype"] = compute_dtype
    return config


@dataclass(frozen=True, kw_only=True)
class _Field:
    accepts: Callable[[Any], bool]
    allowed: str


def _one_of(*allowed: str) -> _Field:
    return _Field(accepts=lambda value: value in allowed, allowed=", ".join(allowed))


_BOOL = _Field(accepts=lambda value: isinstance(value, bool), allowed="true, false")
_NUMBER = _Field(
    accepts=lambda value: isinstance(value, int | float) and not isinstance(value, bool), allowed="a number"
)
_NAMES = _Field(
    accepts=lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    allowed="a list of module names",
)
_FIELDS: Mapping[str, _Field] = {
    "quant_method": _one_of("bitsandbytes"),
    "load_in_4bit": _BOOL,
    "load_in_8bit": _BOOL,
    "_load_in_4bit": _BOOL,
    "_load_in_8bit": _BOOL,
    "bnb_4bit_quant_type": _one_of(*QUANT_TYPES),
    "bnb_4bit_use_double_quant": _BOOL,
    "bnb_4bit_quant_storage": _one_of(*STORAGE_DTYPES),
    "bnb_4bit_compute_dtype": _one_of(*DTYPES),
    "llm_int8_threshold": _NUMBER,
    "llm_int8_skip_modules": _NAMES,
    "llm_int8_enable_fp32_cpu_offload": _BOOL,
    "llm_int8_has_fp16_weight": _BOOL,
}
