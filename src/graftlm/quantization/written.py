"""What a model can be written as, by the names `graft quantize --to` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.bitsandbytes.config import quantization_config
from graftlm.quantization.format import Quantizer
from graftlm.quantization.round_to_nearest import RoundToNearest


@dataclass(frozen=True, kw_only=True)
class WrittenFormat:
    """config: paths of linear modules that stay in full precision, name of the compute dtype -> the
    `quantization_config` with which the weights are read again."""

    quantizer: Quantizer
    config: Callable[[Sequence[str], str], dict[str, Any]]


def _bitsandbytes(name: str, skipped_modules: Sequence[str], compute_dtype: str) -> dict[str, Any]:
    return quantization_config(name, skipped_modules=skipped_modules, compute_dtype=compute_dtype)


def _gptq(rounding: RoundToNearest, skipped_modules: Sequence[str], compute_dtype: str) -> dict[str, Any]:
    return rounding.quantization_config(lm_head=False)


_FOUR_BITS = RoundToNearest()
WRITTEN_FORMATS: Mapping[str, WrittenFormat] = {
    **{
        name: WrittenFormat(quantizer=quantizer, config=partial(_bitsandbytes, name))
        for name, quantizer in QUANTIZERS.items()
    },
    "gptq-sym-int4": WrittenFormat(quantizer=_FOUR_BITS, config=partial(_gptq, _FOUR_BITS)),
}
