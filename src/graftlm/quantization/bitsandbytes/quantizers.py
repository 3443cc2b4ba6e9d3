"""The quantisers by the names `quantization=` takes."""

from __future__ import annotations

from collections.abc import Mapping

from graftlm.quantization.bitsandbytes.eight_bit_quantizer import EightBitQuantizer
from graftlm.quantization.bitsandbytes.four_bit_quantizer import FourBitQuantizer
from graftlm.quantization.format import Quantizer

QUANTIZERS: Mapping[str, Quantizer] = {
    "nf4": FourBitQuantizer(quant_type="nf4"),
    "nf4-double": FourBitQuantizer(quant_type="nf4", double=True),
    "fp4": FourBitQuantizer(quant_type="fp4"),
    "fp4-double": FourBitQuantizer(quant_type="fp4", double=True),
    "int8": EightBitQuantizer(),
}
