"""Int8 matrices that bitsandbytes wrote mean what bitsandbytes says."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from graftlm.quantization.bitsandbytes import EightBitWeight, bitsandbytes_format
from tests.quantization.bitsandbytes_oracle import CPU, PATH, int8, random_matrix
from tests.quantization.memory_tensors import MemoryTensors


def read(tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> EightBitWeight:
    reader = bitsandbytes_format({"load_in_8bit": True})
    weight = reader.read(MemoryTensors(tensors), PATH, shape=shape, dtype=dtype, device=CPU)
    assert isinstance(weight, EightBitWeight)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantising_int8_equals_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = int8(random_matrix(40, 150))
    expected = bnb.int8_vectorwise_dequant(tensors[f"{PATH}.weight"], tensors[f"{PATH}.SCB"]).to(dtype)
    weight = read(tensors, (40, 150), dtype)
    ids = torch.tensor([7, 0, 7, 39])
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.rows(ids), expected[ids])
    assert torch.equal(weight.part(3, 20).part(2, 9).dequantize(), expected[5:12])


def test_int8_without_a_weight_format_lies_by_row() -> None:
    tensors = int8(random_matrix(8, 32))
    expected = read(tensors, (8, 32)).dequantize()
    del tensors[f"{PATH}.weight_format"]
    assert torch.equal(read(tensors, (8, 32)).dequantize(), expected)


def test_int8_weights_stay_packed_in_memory() -> None:
    assert read(int8(random_matrix(16, 512)), (16, 512)).num_bytes <= 1.01 * 16 * 512


def test_a_part_of_int8_shares_the_memory_of_the_whole() -> None:
    whole = read(int8(random_matrix(8, 32)), (8, 32))
    part = whole.part(2, 5)
    assert part.codes.untyped_storage().data_ptr() == whole.codes.untyped_storage().data_ptr()


def test_an_outlier_beside_a_row_does_not_change_its_product() -> None:
    weight = read(int8(random_matrix(24, 64)), (24, 64))
    x = random_matrix(3, 64, seed=1)
    with_outlier = x.clone()
    with_outlier[1, 5] = 60.0
    assert torch.equal(weight.matmul(x)[[0, 2]], weight.matmul(with_outlier)[[0, 2]])
    torch.testing.assert_close(weight.matmul(x), x @ weight.dequantize().T, rtol=1e-5, atol=1e-5)
