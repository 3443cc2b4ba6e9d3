"""Quantised weights that the C++ kernels multiply with by their codes: the values stay those of the format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.registry import DETERMINISTIC, REFERENCE, choose_kernels
from graftlm.quantization import Weight
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.bitsandbytes.four_bit_quantizer import FourBitQuantizer
from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.format import Quantizer
from graftlm.quantization.gguf import GGUFWeight
from graftlm.quantization.gguf_blocks import BLOCK_TYPES
from graftlm.quantization.grouped_integers import GroupedIntegers
from graftlm.quantization.packed import PackedWeight, coded_weight
from graftlm.quantization.packed_codes import PackedCodes
from graftlm.quantization.round_to_nearest import RoundToNearest
from graftlm.quantization.scale_grid import ScaleGrid
from graftlm.quantization.scaled_e2m1 import ScaledE2M1
from graftlm.quantization.scaled_float8 import ScaledFloat8

KERNELS = choose_kernels(torch.device("cpu"), deterministic=False)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(rows: int, columns: int, size: int, *, bits: int, index: Tensor | None = None) -> GroupedIntegers:
    """Codes with zero points of their own for each group."""
    generator, groups = torch.Generator().manual_seed(0), -(-columns // size)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8)
    return GroupedIntegers(
        codes=PackedCodes.pack(codes, bits),
        scale=(torch.rand(rows, groups, generator=generator) * 0.1).half(),
        zero=torch.randint(0, 1 << bits, (rows, groups), generator=generator).to(torch.uint8),
        columns=ColumnGroups(columns=columns, size=size, index=index),
        dtype=torch.float32,
    )


def gguf_blocks(kind: str, rows: int, columns: int) -> GGUFWeight:
    """Random blocks. No float16 is infinite whose bytes are this small."""
    block_type = BLOCK_TYPES[kind]
    row_bytes = columns // block_type.weights * block_type.num_bytes
    packed = torch.randint(0, 64, (rows, row_bytes), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return GGUFWeight(packed, block_type, dtype=torch.float32)


def float8(values: torch.dtype, scale: Tensor, *, rows: int, columns: int) -> ScaledFloat8:
    """80 x 200 floats in blocks of `rows` by `columns`, with a scale each."""
    return ScaledFloat8(
        values=noise(80, 200).to(values),
        grid=ScaleGrid(
            scale=scale,
            row_groups=torch.arange(80, dtype=torch.int32) // rows,
            columns=ColumnGroups(columns=200, size=columns),
        ),
        dtype=torch.float32,
    )


def exponents(rows: int, groups: int) -> Tensor:
    """Around one."""
    near = torch.randint(120, 132, (rows, groups), generator=torch.Generator().manual_seed(3))
    return near.to(torch.uint8).view(torch.float8_e8m0fnu)


def four_bit_floats(scale: Tensor, global_scale: float, size: int) -> ScaledE2M1:
    """80 x 160."""
    stream = torch.randint(0, 256, (80, 80), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return ScaledE2M1(
        codes=PackedCodes.from_bytes(stream, 160, 4),
        scale=scale,
        global_scale=torch.tensor([global_scale]),
        columns=ColumnGroups(columns=160, size=size),
        dtype=torch.float32,
    )


SHUFFLED = torch.arange(256, dtype=torch.int32)[torch.randperm(256, generator=torch.Generator().manual_seed(1))] // 64
WEIGHTS: dict[str, Weight] = {
    **{name: QUANTIZERS[name].quantize(noise(80, 256), dtype=torch.float32) for name in QUANTIZERS},
    "int8, odd shape": QUANTIZERS["int8"].quantize(noise(37, 99), dtype=torch.float32),
    "symmetric int4": RoundToNearest().quantize(noise(80, 256), dtype=torch.float32),
    "symmetric int4, short last group": RoundToNearest().quantize(noise(80, 200), dtype=torch.float32),
    "symmetric int8": RoundToNearest(bits=8).quantize(noise(80, 256), dtype=torch.float32),
    **{kind: gguf_blocks(kind, 80, 512) for kind in BLOCK_TYPES if kind != "Q2_K"},
    "asymmetric int3": integers(80, 256, 64, bits=3),
    "asymmetric int4": integers(80, 256, 64, bits=4),
    "asymmetric int8": integers(80, 256, 64, bits=8),
    "int4 in activation order": integers(80, 256, 64, bits=4, index=SHUFFLED),
    "fp8, one scale": float8(torch.float8_e4m3fn, noise(1, 1).abs(), rows=80, columns=200),
    "fp8, a scale per row": float8(torch.float8_e4m3fn, noise(80, 1).abs().bfloat16(), rows=1, columns=200),
    "fp8, blocks": float8(torch.float8_e4m3fn, noise(3, 5).abs(), rows=32, columns=48),
    "fp8, blocks with exponents": float8(torch.float8_e5m2, exponents(3, 5), rows=32, columns=48),
    "mxfp8": float8(torch.float8_e4m3fn, exponents(80, 7), rows=1, columns=32),
    "mxfp4": four_bit_floats(exponents(80, 5), 1.0, 32),
    "nvfp4": four_bit_floats(noise(80, 10).abs().to(torch.float8_e4m3fn), 300.0, 16),
}


def laid_out(weight: Weight, kernels: Kernels = KERNELS) -> PackedWeight:
    found = coded_weight(weight, kernels, dtype=torch.float32)
    assert isinstance(found, PackedWeight)
    return found


@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_stand_for_what_the_format_defines_to_the_bit(name: str) -> None:
    weight = WEIGHTS[name]
    codes = weight.grouped_codes()
    assert codes is not None
    assert torch.equal(codes.decode(), weight.dequantize())


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_that_was_laid_out_gives_the_same_rows(name: str) -> None:
    weight = WEIGHTS[name]
    coded, ids = laid_out(weight), torch.tensor([3, 0, 36, 3])
    assert (coded.shape, coded.format) == (weight.shape, weight.format)
    assert torch.equal(coded.dequantize(), weight.dequantize())
    assert torch.equal(coded.rows(ids), weight.rows(ids))
    assert torch.equal(coded.part(5, 30).dequantize(), weight.part(5, 30).dequantize())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_its_product_is_that_of_the_dequantised_matrix(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]
    coded = coded_weight(weight, KERNELS, dtype=dtype)
    x, bias = noise(5, weight.shape[1], seed=1).to(dtype), noise(weight.shape[0], seed=2).to(dtype)
    expected = x.float() @ weight.dequantize().t() + bias.float()
    error = (coded.matmul(x, bias).float() - expected).abs().max()
    assert error <= TOLERANCES[dtype] * (1 + expected.abs().max())


def test_inputs_have_the_gradient_of_the_dequantised_matrix() -> None:
    weight = WEIGHTS["nf4"]
    x = noise(4, weight.shape[1]).requires_grad_()
    out, expected = laid_out(weight).matmul(x), x @ weight.dequantize().t()
    downstream = noise(4, weight.shape[0], seed=1)
    (gradient,) = torch.autograd.grad((out * downstream).sum(), x)
    (wanted,) = torch.autograd.grad((expected * downstream).sum(), x)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    ("quantizer", "limit"), [(QUANTIZERS["nf4"], 0.57), (QUANTIZERS["nf4-double"], 0.53), (QUANTIZERS["int8"], 1.01)]
)
def test_memory_stays_that_of_the_format(quantizer: Quantizer, limit: float) -> None:
    weight = quantizer.quantize(noise(512, 512), dtype=torch.bfloat16)
    assert laid_out(weight).num_bytes <= limit * 512 * 512


def test_floats_grow_by_no_more_than_their_table() -> None:
    for name in ("fp8, one scale", "fp8, blocks", "mxfp8", "mxfp4", "nvfp4"):
        weight = WEIGHTS[name]
        assert laid_out(weight).num_bytes <= weight.num_bytes + 2 * 1024


def test_what_has_no_fast_product_stays_as_it_is() -> None:
    for weight in (
        FourBitQuantizer(quant_type="nf4").quantize(noise(32, 96), dtype=torch.float32),
        integers(32, 256, 64, bits=2),
        gguf_blocks("Q2_K", 32, 512),
        integers(32, 256, 64, bits=4, index=torch.arange(256, dtype=torch.int32) % 3),
    ):
        assert coded_weight(weight, KERNELS, dtype=torch.float32) is weight
    for kernels in (REFERENCE, DETERMINISTIC):
        assert coded_weight(WEIGHTS["nf4"], kernels, dtype=torch.float32) is WEIGHTS["nf4"]
    assert coded_weight(WEIGHTS["nf4"], KERNELS, dtype=torch.float16) is WEIGHTS["nf4"]
    narrow = float8(torch.float8_e4m3fn, noise(80, 10).abs(), rows=1, columns=20)
    assert coded_weight(narrow, KERNELS, dtype=torch.float32) is narrow
