"""Weights in GGUF blocks, against the gguf package's dequantiser."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional

from graftlm.errors import CheckpointError
from graftlm.quantization.gguf import GGUFFormat, GGUFWeight, read_gguf_format
from graftlm.quantization.gguf_blocks import BLOCK_TYPES

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", BLOCK_TYPES)
# Where a block keeps its float16 scales.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
# Largest, smallest normal, smallest subnormal, a subnormal, both zeros, and negatives of them.
SCALES = np.array([65504, 6.1e-5, 6e-8, 3e-6, 0.0, -0.0, -65504, -6e-8, 1.0, -0.3], dtype=np.float16)


class StoredBytes:
    """Tensors of a file, by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read_stored(self, name: str) -> Tensor:
        return self._tensors[name]


def random_rows(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes with random finite scales."""
    generator = np.random.default_rng(seed)
    num_bytes = BLOCK_TYPES[kind].num_bytes
    packed = generator.integers(0, 256, (rows * blocks, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = generator.normal(size=(rows * blocks, 1)).astype(np.float16)
        packed[:, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        # An exponent, whose largest values overflow; the smallest give subnormal numbers.
        packed[:, 0] = np.arange(rows * blocks) % 250
    return packed.reshape(rows, blocks * num_bytes)


def reference(packed: np.ndarray, kind: str) -> Tensor:
    return torch.from_numpy(dequantize(packed, gguf.GGMLQuantizationType[kind]))


def weight(packed: np.ndarray, kind: str, dtype: torch.dtype = torch.float32) -> GGUFWeight:
    return GGUFWeight(torch.from_numpy(packed), BLOCK_TYPES[kind], dtype=dtype)


def assert_bit_equal(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))


@KINDS
def test_a_block_type_has_the_sizes_of_the_gguf_package(kind: str) -> None:
    block_type = BLOCK_TYPES[kind]
    assert (block_type.weights, block_type.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@KINDS
def test_dequantised_random_blocks_are_bit_equal_to_the_gguf_packages(kind: str) -> None:
    packed = random_rows(kind, 24, 8)
    assert_bit_equal(weight(packed, kind).dequantize(), reference(packed, kind))


@KINDS
def test_extreme_subnormal_and_negative_scales_are_bit_equal_to_the_gguf_packages(kind: str) -> None:
    packed = random_rows(kind, 1, len(SCALES) ** 2).reshape(-1, BLOCK_TYPES[kind].num_bytes)
    pairs = np.stack([axis.ravel() for axis in np.meshgrid(SCALES, SCALES)])
    for at, scales in zip(HALVES[kind], pairs, strict=False):
        packed[:, at : at + 2] = scales.reshape(-1, 1).view(np.uint8)
    assert_bit_equal(weight(packed, kind).dequantize(), reference(packed, kind))


@KINDS
def test_rows_and_parts_are_those_of_the_whole_matrix(kind: str) -> None:
    packed = random_rows(kind, 10, 2)
    whole = weight(packed, kind)
    ids = torch.tensor([7, 0, 7, 9])
    assert_bit_equal(whole.rows(ids), reference(packed, kind)[ids])
    part = whole.part(3, 8)
    assert_bit_equal(part.dequantize(), reference(packed, kind)[3:8])
    assert_bit_equal(part.rows(torch.tensor([0, 4])), reference(packed, kind)[[3, 7]])
    assert whole.rows(torch.tensor([], dtype=torch.int64)).shape == (0, whole.shape[1])


@KINDS
def test_a_product_is_that_of_the_dequantised_matrix(kind: str) -> None:
    packed = random_rows(kind, 12, 2)
    matrix, bias = reference(packed, kind), torch.randn(12)
    x = torch.randn(5, matrix.shape[1])
    assert torch.equal(weight(packed, kind).matmul(x, bias), functional.linear(x, matrix, bias))
    half = weight(packed, kind, torch.bfloat16).matmul(x.bfloat16())
    assert torch.equal(half, functional.linear(x.bfloat16(), matrix.bfloat16()))


def test_a_product_too_large_to_dequantise_at_once_is_made_in_slabs() -> None:
    packed = random_rows("Q8_0", 130, 1200)
    matrix, x = reference(packed, "Q8_0"), torch.randn(3, 1200 * 32)
    product = weight(packed, "Q8_0").matmul(x)
    torch.testing.assert_close(product, functional.linear(x, matrix), rtol=1e-5, atol=1e-2)


@KINDS
def test_a_weight_takes_the_bytes_of_the_file_and_parts_take_none(kind: str) -> None:
    packed = torch.from_numpy(random_rows(kind, 6, 3))
    whole = GGUFWeight(packed, BLOCK_TYPES[kind], dtype=torch.float32)
    assert whole.num_bytes == packed.numel()
    assert whole.shape == (6, 3 * BLOCK_TYPES[kind].weights)
    assert whole.format == kind
    part = whole.part(2, 4)
    assert part.num_bytes == packed.numel() // 3
    packed[2:4] = 0
    assert not part.dequantize().any()


def test_a_format_reads_each_matrix_in_its_own_type() -> None:
    types = {"a.weight": "Q4_K", "b.weight": "Q6_K"}
    packed = {name: random_rows(kind, 4, 1) for name, kind in types.items()}
    stored = StoredBytes({name: torch.from_numpy(rows) for name, rows in packed.items()})
    weight_format = read_gguf_format({"quant_method": "gguf", "block_types": types})
    for name, kind in types.items():
        path = name.removesuffix(".weight")
        assert weight_format.stores(stored, path)
        assert weight_format.tensor_names(stored, path) == {name}
        read = weight_format.read(stored, path, shape=(4, 256), dtype=torch.float32, device=CPU)
        assert read.format == kind
        assert_bit_equal(read.dequantize(), reference(packed[name], kind))
    assert not weight_format.stores(stored, "c")


def test_types_that_are_not_kept_quantised_are_named_in_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    types = {"a.weight": "IQ4_NL", "b.weight": "IQ4_NL", "c.weight": "TQ1_0", "d.weight": "Q8_0"}
    with caplog.at_level(logging.WARNING):
        weight_format = read_gguf_format({"quant_method": "gguf", "block_types": types})
    [message] = caplog.messages
    assert "2 of type IQ4_NL, 1 of type TQ1_0" in message
    assert [weight_format.stores(StoredBytes({}), path) for path in "abcd"] == [False, False, False, True]


@pytest.mark.parametrize(
    "stored",
    [
        torch.zeros(3, 144, dtype=torch.uint8),
        torch.zeros(4, 143, dtype=torch.uint8),
        torch.zeros(4, 288, dtype=torch.uint8),
        torch.zeros(4, 144, dtype=torch.int8),
        torch.zeros(4 * 144, dtype=torch.uint8),
    ],
    ids=["rows", "part_of_a_block", "columns", "dtype", "flat"],
)
def test_misshapen_blocks_are_refused_by_the_matrix_name(stored: Tensor) -> None:
    weight_format = GGUFFormat({"x.weight": BLOCK_TYPES["Q4_K"]})
    with pytest.raises(CheckpointError, match=r"x\.weight does not hold Q4_K blocks of a 4 x 256 matrix"):
        weight_format.read(StoredBytes({"x.weight": stored}), "x", shape=(4, 256), dtype=torch.float32, device=CPU)


def test_a_width_that_is_no_whole_number_of_blocks_is_refused() -> None:
    weight_format = GGUFFormat({"x.weight": BLOCK_TYPES["Q4_K"]})
    stored = StoredBytes({"x.weight": torch.zeros(4, 144, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="4 x 300 matrix"):
        weight_format.read(stored, "x", shape=(4, 300), dtype=torch.float32, device=CPU)
