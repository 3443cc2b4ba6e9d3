"""Turning float32 values into the nearest codes of a table, block by block, as bitsandbytes rounds on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Stands in for the scale of a block of zeros.
SMALLEST_ABSMAX = 1e-38
# bitsandbytes looks 8-bit codes up in a list of this many points from -1 to 1.
NUM_GRID_POINTS = 1 << 16


def quantize_four_bit(values: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks of values to packed codes and scales; the last block may be short.

    Args:
        values: float32 [n].
        table: float32 [16], in any order.

    Returns:
        uint8 [ceil(n / 2)], the earlier code in the high bits, and float32 [ceil(n / block_size)], the largest
        magnitude of each block.

    Source: bitsandbytes 0.50 `quantize_4bit`.
    """
    num_full = values.numel() // block_size
    full, rest = values[: num_full * block_size].view(num_full, block_size), values[num_full * block_size :]
    absmax = full.abs().amax(dim=1)
    fractions = (full * (1.0 / absmax.clamp(min=SMALLEST_ABSMAX)).unsqueeze(1)).view(-1)
    if rest.numel():
        rest_absmax = rest.abs().amax().clamp(min=SMALLEST_ABSMAX)
        absmax = torch.cat([absmax, rest_absmax.unsqueeze(0)])
        fractions = torch.cat([fractions, rest / rest_absmax])
    ascending, order = table.sort(stable=True)
    # After an odd number of values the library packs the code of zero.
    fractions = functional.pad(fractions, (0, fractions.numel() % 2))
    codes = order.to(torch.uint8)[torch.bucketize(fractions, _middles(ascending), out_int32=True)]
    return codes[::2] << 4 | codes[1::2], absmax


def quantize_scales(values: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks of values to 8-bit codes and scales; the last block may be short.

    Fractions of a block's largest magnitude are first rounded to a grid of 65,536 points, which has none at zero.

    Args:
        values: float32 [n].
        table: float32 [256], ascending.

    Returns:
        uint8 [n], and float32 [ceil(n / block_size)].

    Source: bitsandbytes 0.50 `quantize_blockwise` on CPU.
    """
    num_blocks = -(-values.numel() // block_size)
    padded = functional.pad(values, (0, num_blocks * block_size - values.numel())).view(num_blocks, block_size)
    absmax = padded.abs().amax(dim=1, keepdim=True)
    fractions = (padded * (1.0 / absmax)).clamp(-1, 1)
    steps = NUM_GRID_POINTS - 1
    nearest = ((fractions + 1) * 0.5 * steps + 0.5).trunc()
    codes = torch.bucketize(nearest * 2 / steps - 1, _middles(table), out_int32=True).to(torch.uint8)
    codes = torch.where(absmax == 0, 0, codes)
    return codes.view(-1)[: values.numel()], absmax.view(-1)


def _middles(ascending: Tensor) -> Tensor:
    """Between which values a code is the nearest; a value in the middle takes the lower code."""
    return (ascending[:-1] + ascending[1:]) / 2
