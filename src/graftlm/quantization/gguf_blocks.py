"""The block types of GGUF files that are kept quantised in memory: what a block's bytes mean.

Source: ggml's block layouts (ggml-common.h); the `gguf` package's dequantiser defines the float32 values, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Four-bit floats, times two.
MXFP4_VALUES = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0])


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """One way to store consecutive weights of a row.

    Args:
        name: ggml's name, such as "Q4_K".
        weights: weights in a block.
        num_bytes: bytes of a block.
        unpack: blocks [N, num_bytes] uint8 -> their weights [N, weights] float32.
    """

    name: str
    weights: int
    num_bytes: int
    unpack: Callable[[Tensor], Tensor]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, as float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bit_fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """Unsigned integers of `bits` bits. Each `width` bytes hold 8 / bits runs of `width` integers: the first run in the
    lowest bits of the bytes, the next above it. packed: [N, B] uint8 -> [N, B * 8 / bits] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    runs = packed.reshape(packed.shape[0], packed.shape[1] // width, 1, width)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _scaled(scales: Tensor, codes: Tensor) -> Tensor:
    """codes [N, W] float32, each run of W / G times its own scale [N, G]."""
    return (scales.unsqueeze(2) * _grouped(codes, scales.shape[1])).flatten(1)


def _shifted(values: Tensor, minima: Tensor) -> Tensor:
    """values [N, W], each run of W / G less its own minimum [N, G]."""
    return (_grouped(values, minima.shape[1]) - minima.unsqueeze(2)).flatten(1)


def _grouped(values: Tensor, groups: int) -> Tensor:
    return values.view(values.shape[0], groups, values.shape[1] // groups)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_bit_fields(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _bit_fields(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """high: [N, 4], one bit per weight. low: [N, 16], four bits each. -> [N, 32] float32, 0 to 31."""
    return (_bit_fields(low, 4, 16) | (_bit_fields(high, 1, 1) << 4)).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, :16]
    scales = _half(blocks, 80) * (packed & 15).float()
    minima = _half(blocks, 82) * (packed >> 4).float()
    return _shifted(_scaled(scales, _bit_fields(blocks[:, 16:80], 2, 32).float()), minima)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = _bit_fields(blocks[:, 96:104], 4, 8), _bit_fields(blocks[:, 104:108], 2, 4)
    scales = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    codes = _bit_fields(blocks[:, 32:96], 2, 32) | (_bit_fields(blocks[:, :32], 1, 32) << 2)
    return _scaled(scales, codes.float() - 4)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits from twelve bytes. The first four of each fill the low six bits of
    bytes 0-3 and 4-7, whose top two bits are those of the other four; bytes 8-11 hold the low nibbles of these.

    packed: [N, 12] uint8 -> two of [N, 8] float32.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = _bit_fields(blocks[:, 16:], 4, 32).float()
    return _shifted(_scaled(_half(blocks, 0) * scales, codes), _half(blocks, 2) * minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = (_bit_fields(blocks[:, 48:], 4, 32) | (_bit_fields(blocks[:, 16:48], 1, 32) << 4)).float()
    return _shifted(_scaled(_half(blocks, 0) * scales, codes), _half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _bit_fields(blocks[:, :128], 4, 64) | (_bit_fields(blocks[:, 128:192], 2, 32) << 4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _scaled(scales, codes.float() - 32)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    # Of half the scale, since the values below are twice what they mean; the two smallest are subnormal.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp(min=0) << 23)
    values = MXFP4_VALUES.to(blocks.device)[_bit_fields(blocks[:, 1:], 4, 16).int()]
    return bits.view(torch.float32) * values


BLOCK_TYPES = {
    block_type.name: block_type
    for block_type in (
        BlockType(name="Q4_0", weights=32, num_bytes=18, unpack=_q4_0),
        BlockType(name="Q4_1", weights=32, num_bytes=20, unpack=_q4_1),
        BlockType(name="Q5_0", weights=32, num_bytes=22, unpack=_q5_0),
        BlockType(name="Q5_1", weights=32, num_bytes=24, unpack=_q5_1),
        BlockType(name="Q8_0", weights=32, num_bytes=34, unpack=_q8_0),
        BlockType(name="MXFP4", weights=32, num_bytes=17, unpack=_mxfp4),
        BlockType(name="Q2_K", weights=256, num_bytes=84, unpack=_q2_k),
        BlockType(name="Q3_K", weights=256, num_bytes=110, unpack=_q3_k),
        BlockType(name="Q4_K", weights=256, num_bytes=144, unpack=_q4_k),
        BlockType(name="Q5_K", weights=256, num_bytes=176, unpack=_q5_k),
        BlockType(name="Q6_K", weights=256, num_bytes=210, unpack=_q6_k),
    )
}
