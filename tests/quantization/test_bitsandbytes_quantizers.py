"""Quantising gives bitsandbytes' own codes, and bitsandbytes loads what is saved."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import bitsandbytes.nn
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import profile

from graftlm.quantization.bitsandbytes import QUANTIZERS, BitsAndBytesConfig, bitsandbytes_format
from graftlm.quantization.bitsandbytes.config import quantization_config
from graftlm.quantization.bitsandbytes.four_bit_quantizer import FourBitQuantizer
from tests.quantization.bitsandbytes_oracle import CPU, PATH, four_bit, int8, random_matrix
from tests.quantization.memory_tensors import MemoryTensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FOUR_BIT = ["nf4", "nf4-double", "fp4", "fp4-double"]


def stored(quantization: str, matrix: Tensor) -> dict[str, Tensor]:
    weight = QUANTIZERS[quantization].quantize(matrix, dtype=matrix.dtype)
    return {f"{PATH}.{name}": tensor for name, tensor in weight.stored_tensors().items()}


def same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", FOUR_BIT)
def test_four_bit_tensors_equal_those_bitsandbytes_stores(quantization: str, dtype: torch.dtype) -> None:
    matrix = random_matrix(300, 192, dtype)
    matrix[3] = 0
    quant_type, _, double = quantization.partition("-")
    expected, _, _ = four_bit(matrix, quant_type=quant_type, compress_statistics=bool(double))
    same(stored(quantization, matrix), expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    block_size=st.sampled_from([32, 64, 256, 4096]),
    quantization=st.sampled_from(FOUR_BIT),
    seed=st.integers(0, 5),
)
def test_any_shape_and_block_size_gives_the_tensors_bitsandbytes_stores(
    rows: int, columns: int, block_size: int, quantization: str, seed: int
) -> None:
    matrix = random_matrix(rows, columns, seed=seed)
    quant_type, _, double = quantization.partition("-")
    expected, _, _ = four_bit(matrix, quant_type=quant_type, compress_statistics=bool(double), blocksize=block_size)
    quantizer = FourBitQuantizer(
        quant_type="nf4" if quant_type == "nf4" else "fp4", double=bool(double), block_size=block_size
    )
    weight = quantizer.quantize(matrix, dtype=torch.float32)
    same({f"{PATH}.{name}": tensor for name, tensor in weight.stored_tensors().items()}, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_tensors_equal_those_bitsandbytes_stores(dtype: torch.dtype) -> None:
    matrix = random_matrix(300, 100, dtype)
    matrix[3] = 0
    same(stored("int8", matrix), int8(matrix))


@pytest.mark.parametrize("quantization", list(QUANTIZERS))
def test_matrices_of_several_slabs_and_transposed_ones_give_the_same_tensors(quantization: str) -> None:
    matrix = random_matrix(1200, 1000)
    quant_type, _, double = quantization.partition("-")
    if quantization == "int8":
        expected = int8(matrix)
    else:
        expected, _, _ = four_bit(matrix, quant_type=quant_type, compress_statistics=bool(double))
    same(stored(quantization, matrix.T.contiguous().T), expected)


@pytest.mark.parametrize("quantization", list(QUANTIZERS))
def test_quantising_allocates_no_copy_of_the_matrix(quantization: str) -> None:
    matrix = torch.randn(4096, 2048).bfloat16()
    with profile(profile_memory=True) as profiled:
        QUANTIZERS[quantization].quantize(matrix, dtype=torch.bfloat16)
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    # Int8 codes, which stay, are half a bfloat16 matrix; in float32 a copy would be twice one.
    assert largest <= matrix.nbytes / 2 + 4096


@pytest.mark.parametrize("quantization", FOUR_BIT)
def test_bitsandbytes_loads_the_four_bit_tensors(quantization: str) -> None:
    matrix = random_matrix(24, 128, torch.bfloat16)
    tensors = {name.removeprefix(f"{PATH}.weight."): value for name, value in stored(quantization, matrix).items()}
    codes = tensors.pop(f"{PATH}.weight")
    parameter = bitsandbytes.nn.Params4bit.from_prequantized(codes, tensors, device="cpu")
    weight = QUANTIZERS[quantization].quantize(matrix, dtype=torch.bfloat16)
    assert torch.equal(bnb.dequantize_4bit(parameter.data, parameter.quant_state), weight.dequantize())
    layer = bitsandbytes.nn.Linear4bit(128, 24, bias=False)
    layer.weight = parameter
    x = random_matrix(2, 128, seed=1).requires_grad_()
    torch.testing.assert_close(layer(x), x @ weight.dequantize().float().T, rtol=2e-2, atol=2e-2)


def test_bitsandbytes_loads_the_int8_tensors() -> None:
    matrix = random_matrix(24, 128, torch.float16)
    layer = bitsandbytes.nn.Linear8bitLt(128, 24, bias=False, has_fp16_weights=False).to("cpu")
    layer.load_state_dict({name.removeprefix(f"{PATH}."): value for name, value in stored("int8", matrix).items()})
    weight = QUANTIZERS["int8"].quantize(matrix, dtype=torch.float32)
    assert torch.equal(bnb.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB), weight.dequantize())


@pytest.mark.parametrize("quantization", list(QUANTIZERS))
def test_what_is_saved_is_read_back_the_same(quantization: str) -> None:
    matrix = random_matrix(30, 100)
    weight = QUANTIZERS[quantization].quantize(matrix, dtype=torch.bfloat16)
    config = quantization_config(quantization, skipped_modules=["lm_head"], compute_dtype="bfloat16")
    assert BitsAndBytesConfig.parse(config).quantization == quantization
    tensors = {f"{PATH}.{name}": tensor for name, tensor in weight.stored_tensors().items()}
    read = bitsandbytes_format(config).read(
        MemoryTensors(tensors), PATH, shape=(30, 100), dtype=torch.bfloat16, device=CPU
    )
    assert read.format == weight.format
    assert torch.equal(read.dequantize(), weight.dequantize())


@pytest.mark.parametrize("quantization", list(QUANTIZERS))
def test_float64_is_quantised_as_its_float32_rounding(quantization: str) -> None:
    matrix = random_matrix(8, 96).double() / 3
    assert torch.equal(
        QUANTIZERS[quantization].quantize(matrix, dtype=torch.float32).dequantize(),
        QUANTIZERS[quantization].quantize(matrix.float(), dtype=torch.float32).dequantize(),
    )


def test_a_part_that_begins_inside_a_block_cannot_be_stored() -> None:
    weight = FourBitQuantizer(quant_type="nf4").quantize(random_matrix(4, 96), dtype=torch.float32)
    with pytest.raises(ValueError, match="no stored form"):
        weight.part(1, 3).stored_tensors()
