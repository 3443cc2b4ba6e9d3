"""What the codes of each type stand for, as fractions of a block's largest magnitude."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FourBitType = Literal["nf4", "fp4"]

# Quantiles of the normal distribution, zero among them (QLoRA, arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Twelve times the magnitudes of a float with two exponent bits and one mantissa bit; the fourth bit is the sign.
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


def four_bit_table(quant_type: FourBitType) -> Tensor:
    """float32 [16]: the value of each 4-bit code."""
    if quant_type == "nf4":
        return torch.tensor(_NF4)
    magnitudes = torch.tensor(_FP4_MAGNITUDES) / 12
    return torch.cat([magnitudes, -magnitudes])


def dynamic_table() -> Tensor:
    """float32 [256], ascending: the value of each 8-bit code of a doubly quantised scale.

    Each decade from 1e-7 to 1 is cut into equal steps, twice as many as the decade below has; a code is the middle of
    its step. Zero and one complete the table, so it reaches 1 but not -1.

    Source: dynamic tree quantisation, arXiv 2110.02861, as bitsandbytes computes it.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1)
        middles = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(values))
