"""NF4 and FP4 matrices that bitsandbytes wrote mean what bitsandbytes says."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftlm.quantization.bitsandbytes import BitsAndBytesFormat, FourBitWeight, bitsandbytes_format
from tests.quantization.bitsandbytes_oracle import CPU, PATH, decode_by_formula, four_bit, random_matrix
from tests.quantization.memory_tensors import MemoryTensors


def nf4_format() -> BitsAndBytesFormat:
    return bitsandbytes_format({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})


def read(tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> FourBitWeight:
    weight = nf4_format().read(MemoryTensors(tensors), PATH, shape=shape, dtype=dtype, device=CPU)
    assert isinstance(weight, FourBitWeight)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024])
def test_dequantising_equals_bitsandbytes_bit_for_bit(
    block_size: int, quant_type: str, double: bool, dtype: torch.dtype
) -> None:
    matrix = random_matrix(48, 1024, dtype)
    tensors, codes, state = four_bit(matrix, blocksize=block_size, quant_type=quant_type, compress_statistics=double)
    weight = read(tensors, (48, 1024), dtype)
    assert torch.equal(weight.dequantize(), bnb.dequantize_4bit(codes, state))
    assert torch.equal(weight.rows(torch.arange(48)), weight.dequantize())


@pytest.mark.parametrize("block_size", [2048, 4096])
def test_dequantising_large_blocks_equals_bitsandbytes_bit_for_bit(block_size: int) -> None:
    tensors, codes, state = four_bit(random_matrix(6, 4096), blocksize=block_size, quant_type="nf4")
    with torch.compiler.set_stance("force_eager"):
        expected = bnb.dequantize_4bit(codes, state)
    assert torch.equal(read(tensors, (6, 4096)).dequantize(), expected)


@pytest.mark.parametrize(
    "storage", [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_codes_are_read_from_any_storage_dtype(storage: torch.dtype) -> None:
    plain, codes, state = four_bit(random_matrix(16, 128), quant_type="nf4")
    tensors = plain | {f"{PATH}.weight": codes.view(-1).view(storage).unsqueeze(1)}
    assert torch.equal(read(tensors, (16, 128)).dequantize(), bnb.dequantize_4bit(codes, state))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 200),
    block_size=st.sampled_from([32, 64, 128]),
    double=st.booleans(),
    data=st.data(),
)
def test_blocks_that_straddle_rows_follow_the_formula_in_the_whole_in_parts_and_by_row(
    rows: int, columns: int, block_size: int, double: bool, data: st.DataObject
) -> None:
    matrix = random_matrix(rows, columns)
    tensors, _, _ = four_bit(matrix, blocksize=block_size, quant_type="nf4", compress_statistics=double)
    expected = decode_by_formula(tensors, (rows, columns), block_size)
    weight = read(tensors, (rows, columns))
    assert torch.equal(weight.dequantize(), expected)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    part = weight.part(start, stop)
    assert torch.equal(part.dequantize(), expected[start:stop])
    if start < stop:
        ids = torch.tensor(data.draw(st.lists(st.integers(0, stop - start - 1), max_size=8)), dtype=torch.int64)
        assert torch.equal(part.rows(ids), expected[start:stop][ids])
        inner = part.part(1, stop - start) if stop - start > 1 else part
        assert torch.equal(inner.dequantize(), expected[stop - inner.shape[0] : stop])


def test_parts_of_doubly_quantised_scales_begin_inside_groups_of_scales() -> None:
    tensors, codes, state = four_bit(random_matrix(300, 128), quant_type="nf4", compress_statistics=True)
    part = read(tensors, (300, 128)).part(131, 290).part(2, 150)
    assert torch.equal(part.dequantize(), bnb.dequantize_4bit(codes, state)[133:281])


def test_a_part_shares_the_memory_of_the_whole() -> None:
    tensors, _, _ = four_bit(random_matrix(16, 96), quant_type="nf4", compress_statistics=True)
    whole = read(tensors, (16, 96))
    part = whole.part(5, 9)
    assert part.codes.untyped_storage().data_ptr() == whole.codes.untyped_storage().data_ptr()
    assert part.num_bytes < whole.num_bytes


@pytest.mark.parametrize("ids", [[4], [-1]])
def test_rows_outside_a_part_are_refused(ids: list[int]) -> None:
    tensors, _, _ = four_bit(random_matrix(16, 96), quant_type="nf4")
    part = read(tensors, (16, 96)).part(5, 9)
    with pytest.raises(IndexError):
        part.rows(torch.tensor(ids))


@pytest.mark.parametrize(("quantisation", "limit"), [(False, 0.57), (True, 0.53)])
def test_four_bit_weights_stay_packed_in_memory(quantisation: bool, limit: float) -> None:
    tensors, _, _ = four_bit(random_matrix(512, 512), quant_type="nf4", compress_statistics=quantisation)
    weight = read(tensors, (512, 512))
    assert weight.num_bytes == sum(tensor.nbytes for name, tensor in tensors.items() if "quant_state" not in name)
    assert weight.num_bytes <= limit * 512 * 512


def test_products_equal_those_with_the_dequantised_matrix() -> None:
    tensors, codes, state = four_bit(random_matrix(24, 192), quant_type="fp4")
    weight = read(tensors, (24, 192))
    x, bias = random_matrix(5, 192, seed=1), random_matrix(1, 24, seed=2)[0]
    expected = x @ bnb.dequantize_4bit(codes, state).T + bias
    torch.testing.assert_close(weight.matmul(x, bias), expected, rtol=1e-5, atol=1e-5)


def test_the_code_table_of_the_file_counts() -> None:
    tensors, _, _ = four_bit(random_matrix(4, 64), quant_type="nf4")
    plain = read(tensors, (4, 64)).dequantize()
    tensors[f"{PATH}.weight.quant_map"] = tensors[f"{PATH}.weight.quant_map"] * 2
    assert torch.equal(read(tensors, (4, 64)).dequantize(), plain * 2)


def test_a_four_bit_weight_names_its_tensors_and_its_format() -> None:
    tensors, _, _ = four_bit(random_matrix(4, 64), quant_type="nf4", compress_statistics=True)
    file = MemoryTensors(tensors | {f"{PATH}.bias": torch.zeros(4), "lm_head.weight": torch.zeros(4, 64)})
    assert nf4_format().tensor_names(file, PATH) == set(tensors)
    assert nf4_format().stores(file, PATH)
    assert not nf4_format().stores(file, "lm_head")
    assert read(tensors, (4, 64)).format == "nf4-double, blocks of 64"
