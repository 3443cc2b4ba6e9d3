"""The weight formats of bitsandbytes: NF4 and FP4 in blocks with optional double quantisation, and int8 by row. Reads
and writes what transformers saves with them and quantises as the library does, without needing it."""

from graftlm.quantization.bitsandbytes.config import BitsAndBytesConfig
from graftlm.quantization.bitsandbytes.eight_bit_weight import EightBitWeight
from graftlm.quantization.bitsandbytes.format import BitsAndBytesFormat, bitsandbytes_format
from graftlm.quantization.bitsandbytes.four_bit_weight import FourBitWeight
from graftlm.quantization.bitsandbytes.quantizers import QUANTIZERS

__all__ = [
    "QUANTIZERS",
    "BitsAndBytesConfig",
    "BitsAndBytesFormat",
    "EightBitWeight",
    "FourBitWeight",
    "bitsandbytes_format",
]
