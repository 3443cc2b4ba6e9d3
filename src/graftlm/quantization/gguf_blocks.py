"""The block types of GGUF files that are kept quantised in memory: what a block's bytes mean.

Source: ggml's block layouts (ggml-common.h); the `gguf` package's dequantiser defines the float32 values, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlm.kernels.grouped_codes import (
    SIGNED_BYTES,
    SIGNED_NIBBLES,
    CodedValues,
    GroupedCodes,
    GroupValues,
    PlainValues,
)

# Four-bit floats, times two.
MXFP4_VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0])
# What each byte of exponent means with them: half of 2**(byte - 127), of which the two smallest are subnormal.
MXFP4_SCALES = torch.cat([torch.tensor([1 << 21, 1 << 22]), torch.arange(1, 255) << 23]).int().view(torch.float32)
# Bytes as they are, and as minima are stored: to be taken away.
BYTES = torch.arange(256.0)
MINIMA = -BYTES


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """One way to store consecutive weights of a row.

    Args:
        name: ggml's name, such as "Q4_K".
        weights: weights in a block.
        num_bytes: bytes of a block.
        codes: blocks [N, num_bytes] uint8 -> their weights as a matrix of codes [N, weights].
    """

    name: str
    weights: int
    num_bytes: int
    codes: Callable[[Tensor], GroupedCodes]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _bit_fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """Unsigned integers of `bits` bits. Each `width` bytes hold 8 / bits runs of `width` integers: the first run in the
    lowest bits of the bytes, the next above it. packed: [N, B] uint8 -> [N, B * 8 / bits] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    runs = packed.reshape(packed.shape[0], packed.shape[1] // width, 1, width)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _plain(blocks: Tensor, at: int) -> PlainValues:
    """One float16 for all weights of a block."""
    return PlainValues(stored=_half(blocks, at))


def _times_half(blocks: Tensor, at: int, codes: Tensor, table: Tensor) -> CodedValues:
    """A value for each group of a block, table[codes] times the block's float16 at byte `at`. codes: uint8 [N, G]."""
    return CodedValues(codes=codes, table=table, factors=_half(blocks, at).float().flatten(), block_size=codes.shape[1])


def _four_bits(
    codes: Tensor, table: Tensor, scale: GroupValues, minimum: GroupValues | None = None, *, group_size: int = 32
) -> GroupedCodes:
    return GroupedCodes(codes=codes, bits=4, table=table, scale=scale, minimum=minimum, group_size=group_size)


def _eight_bits(
    codes: Tensor, middle: int, scale: GroupValues, minimum: GroupValues | None = None, *, group_size: int = 32
) -> GroupedCodes:
    """Codes that stand for themselves less `middle`."""
    return GroupedCodes(
        codes=codes + (128 - middle),
        bits=8,
        table=SIGNED_BYTES,
        scale=scale,
        minimum=minimum,
        group_size=group_size,
    )


def _q4_0(blocks: Tensor) -> GroupedCodes:
    return _four_bits(_bit_fields(blocks[:, 2:], 4, 16), SIGNED_NIBBLES, _plain(blocks, 0))


def _q4_1(blocks: Tensor) -> GroupedCodes:
    return _four_bits(_bit_fields(blocks[:, 4:], 4, 16), BYTES[:16], _plain(blocks, 0), _plain(blocks, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """high: [N, 4], one bit per weight. low: [N, 16], four bits each. -> [N, 32] uint8, 0 to 31."""
    return _bit_fields(low, 4, 16) | (_bit_fields(high, 1, 1) << 4)


def _q5_0(blocks: Tensor) -> GroupedCodes:
    return _eight_bits(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16, _plain(blocks, 0))


def _q5_1(blocks: Tensor) -> GroupedCodes:
    return _eight_bits(_five_bits(blocks[:, 4:8], blocks[:, 8:]), 0, _plain(blocks, 0), _plain(blocks, 2))


def _q8_0(blocks: Tensor) -> GroupedCodes:
    return _eight_bits(blocks[:, 2:] ^ 128, 128, _plain(blocks, 0))


def _q2_k(blocks: Tensor) -> GroupedCodes:
    packed = blocks[:, :16]
    scale = _times_half(blocks, 80, packed & 15, BYTES)
    minimum = _times_half(blocks, 82, packed >> 4, MINIMA)
    return _four_bits(_bit_fields(blocks[:, 16:80], 2, 32), BYTES[:16], scale, minimum, group_size=16)


def _q3_k(blocks: Tensor) -> GroupedCodes:
    low, high = _bit_fields(blocks[:, 96:104], 4, 8), _bit_fields(blocks[:, 104:108], 2, 4)
    scale = _times_half(blocks, 108, low | (high << 4), BYTES - 32)
    codes = _bit_fields(blocks[:, 32:96], 2, 32) | (_bit_fields(blocks[:, :32], 1, 32) << 2)
    return _four_bits(codes, BYTES[:16] - 4, scale, group_size=16)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits from twelve bytes. The first four of each fill the low six bits of
    bytes 0-3 and 4-7, whose top two bits are those of the other four; bytes 8-11 hold the low nibbles of these.

    packed: [N, 12] uint8 -> two of [N, 8] uint8.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return scales, minima


def _q4_k(blocks: Tensor) -> GroupedCodes:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, minimum = _times_half(blocks, 0, scales, BYTES), _times_half(blocks, 2, minima, MINIMA)
    return _four_bits(_bit_fields(blocks[:, 16:], 4, 32), BYTES[:16], scale, minimum)


def _q5_k(blocks: Tensor) -> GroupedCodes:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, minimum = _times_half(blocks, 0, scales, BYTES), _times_half(blocks, 2, minima, MINIMA)
    codes = _bit_fields(blocks[:, 48:], 4, 32) | (_bit_fields(blocks[:, 16:48], 1, 32) << 4)
    return _eight_bits(codes, 0, scale, minimum)


def _q6_k(blocks: Tensor) -> GroupedCodes:
    codes = _bit_fields(blocks[:, :128], 4, 64) | (_bit_fields(blocks[:, 128:192], 2, 32) << 4)
    scale = _times_half(blocks, 208, blocks[:, 192:208] ^ 128, SIGNED_BYTES)
    return _eight_bits(codes, 32, scale, group_size=16)


def _mxfp4(blocks: Tensor) -> GroupedCodes:
    scale = CodedValues(codes=blocks[:, :1].contiguous(), table=MXFP4_SCALES, factors=torch.ones(1))
    return _four_bits(_bit_fields(blocks[:, 1:], 4, 16), MXFP4_VALUES, scale)


BLOCK_TYPES = {
    block_type.name: block_type
    for block_type in (
        BlockType(name="Q4_0", weights=32, num_bytes=18, codes=_q4_0),
        BlockType(name="Q4_1", weights=32, num_bytes=20, codes=_q4_1),
        BlockType(name="Q5_0", weights=32, num_bytes=22, codes=_q5_0),
        BlockType(name="Q5_1", weights=32, num_bytes=24, codes=_q5_1),
        BlockType(name="Q8_0", weights=32, num_bytes=34, codes=_q8_0),
        BlockType(name="MXFP4", weights=32, num_bytes=17, codes=_mxfp4),
        BlockType(name="Q2_K", weights=256, num_bytes=84, codes=_q2_k),
        BlockType(name="Q3_K", weights=256, num_bytes=110, codes=_q3_k),
        BlockType(name="Q4_K", weights=256, num_bytes=144, codes=_q4_k),
        BlockType(name="Q5_K", weights=256, num_bytes=176, codes=_q5_k),
        BlockType(name="Q6_K", weights=256, num_bytes=210, codes=_q6_k),
    )
}
