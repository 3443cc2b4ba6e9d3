"""The C++ product with a matrix of codes gives what the decoded matrix does, on every level that this machine runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from graftlm.kernels.cpu.backend import cpu_kernels
from graftlm.kernels.cpu.library import LEVELS, Level, open_library, runnable_levels
from graftlm.kernels.grouped_codes import (
    SIGNED_BYTES,
    SIGNED_NIBBLES,
    CodedValues,
    GroupedCodes,
    GroupValues,
    PlainValues,
)
from graftlm.kernels.kernel_set import Kernels, PackedMatrix
from graftlm.kernels.registry import REFERENCE

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
NUMBERS = torch.linspace(-1, 1, 16) ** 3
# Floats of eight bits, of which some stand for no number.
FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)


def runnable(level: Level) -> Level:
    """The level, or the portable one where this machine lacks it."""
    return level if level in runnable_levels() else "portable"


@pytest.fixture(params=LEVELS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those of one level."""
    return cpu_kernels(open_library(runnable(request.param)), REFERENCE)


@pytest.fixture(params=LEVELS, scope="module")
def deterministic_kernels(request: pytest.FixtureRequest) -> Kernels:
    return cpu_kernels(open_library(runnable(request.param)), REFERENCE, deterministic=True)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def random_codes(
    rows: int,
    columns: int,
    group_size: int,
    *,
    bits: int = 4,
    table: Tensor | None = None,
    scale: GroupValues | None = None,
) -> GroupedCodes:
    """Codes with a float32 scale for each group, unless other scales are given; of eight bits they are integers, unless
    a table is given."""
    generator = torch.Generator().manual_seed(0)
    groups = -(-columns // group_size)
    return GroupedCodes(
        codes=torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8),
        bits=bits,
        table=table if table is not None else SIGNED_BYTES if bits == 8 else NUMBERS,
        scale=scale or PlainValues(stored=torch.rand(rows, groups, generator=generator) + 0.5),
        group_size=group_size,
    )


def plain(rows: int, groups: int, dtype: torch.dtype = torch.float32) -> PlainValues:
    return PlainValues(stored=torch.randn(rows, groups, generator=torch.Generator().manual_seed(3)).to(dtype))


def coded(rows: int, groups: int, block_size: int | None) -> CodedValues:
    generator = torch.Generator().manual_seed(4)
    skip = 0 if block_size is None else 3
    count = 1 if block_size is None else -(-(rows * groups + skip) // block_size)
    return CodedValues(
        codes=torch.randint(0, 256, (rows, groups), generator=generator).to(torch.uint8),
        table=torch.rand(256, generator=generator),
        factors=torch.rand(count, generator=generator),
        block_size=block_size,
        skip=skip,
        offset=0.25,
    )


def shared(rows: int, groups: int, count: int) -> PlainValues:
    """Of `count` rows of numbers one for each row."""
    row_groups = torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(6)).int()
    return PlainValues(stored=plain(count, groups).stored, row_groups=row_groups)


def zeros(rows: int, groups: int) -> Tensor:
    return torch.randint(-8, 8, (rows, groups), generator=torch.Generator().manual_seed(5)).to(torch.int16)


def pack(kernels: Kernels, codes: GroupedCodes, dtype: torch.dtype) -> PackedMatrix | None:
    assert kernels.pack_codes is not None
    return kernels.pack_codes(codes, dtype)


def packed(kernels: Kernels, codes: GroupedCodes, dtype: torch.dtype) -> PackedMatrix:
    found = pack(kernels, codes, dtype)
    assert found is not None
    return found


def inputs(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_multiplies(kernels: Kernels, codes: GroupedCodes, dtype: torch.dtype, rows: int) -> None:
    matrix, weight = packed(kernels, codes, dtype), codes.decode()
    out_features, in_features = weight.shape
    some = torch.tensor([out_features - 1, 0, 3, 3])
    assert torch.equal(matrix.rows(torch.arange(out_features)), weight.to(dtype))
    assert torch.equal(matrix.rows(some), weight[some].to(dtype))
    x, bias = inputs(rows, in_features, dtype), inputs(1, out_features, dtype)[0]
    for term in (bias, None):
        out = matrix.linear(x, term)
        exact = x.double() @ weight.double().t() + (0 if term is None else term.double())
        assert out.dtype == dtype
        # Relative to what is summed: zero points and minima cancel.
        size = 1 + (x.double().abs() @ weight.double().abs().t()).max()
        assert (out.double() - exact).abs().max() <= TOLERANCES[dtype] * size
        assert (out.double() - exact).abs().mean() <= TOLERANCES[dtype] * size / 8
    y = inputs(rows, out_features, dtype)
    exact = y.double() @ weight.to(dtype).double()
    size = 1 + (y.double().abs() @ weight.double().abs()).max()
    assert (matrix.turned_linear(y).double() - exact).abs().max() <= TOLERANCES[dtype] * size


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 17, 33, 300])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), [(64, 256, 64), (50, 33, 64), (81, 272, 16)])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_multiply_as_the_decoded_matrix(
    kernels: Kernels, dtype: torch.dtype, rows: int, out_features: int, in_features: int, group_size: int, bits: int
) -> None:
    assert_multiplies(kernels, random_codes(out_features, in_features, group_size, bits=bits), dtype, rows)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), [(64, 256, 128), (50, 33, 64), (81, 270, 16)])
def test_codes_of_eight_bits_may_stand_for_any_numbers(
    kernels: Kernels, dtype: torch.dtype, rows: int, out_features: int, in_features: int, group_size: int
) -> None:
    codes = random_codes(out_features, in_features, group_size, bits=8, table=FLOAT8)
    assert_multiplies(kernels, codes, dtype, rows)


def test_every_code_stands_for_its_number(kernels: Kernels, dtype: torch.dtype) -> None:
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
    for table in (floats, SIGNED_BYTES, FLOAT8, -FLOAT8.flip(0)):
        codes = dataclasses.replace(
            random_codes(16, 256, 256, bits=8, table=table, scale=PlainValues(stored=torch.ones(16, 1))),
            codes=torch.arange(256, dtype=torch.uint8).expand(16, 256),
        )
        matrix = packed(kernels, codes, dtype)
        for ids in (torch.arange(16), torch.tensor([5])):
            torch.testing.assert_close(matrix.rows(ids)[0], table.to(dtype), rtol=0, atol=0, equal_nan=True)
        # A column that is no number spoils the others.
        if bool(table.isfinite().all()):
            assert torch.equal(matrix.linear(torch.eye(256, dtype=dtype), None)[:, 3], table.to(dtype))


def test_numbers_that_only_just_are_none_are_read_back(kernels: Kernels, dtype: torch.dtype) -> None:
    codes = random_codes(16, 64, 32, scale=PlainValues(stored=torch.full((16, 2), 2.0**-127)))
    matrix = packed(kernels, codes, dtype)
    for ids in (torch.arange(16), torch.tensor([5])):
        assert torch.equal(matrix.rows(ids), codes.decode()[ids].to(dtype))
    assert matrix.rows(torch.arange(16)).count_nonzero() > 0


@pytest.mark.parametrize("group_size", [8, 24, 32, 96, 128, 256, 1000])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_may_have_any_multiple_of_eight_columns_or_all(
    kernels: Kernels, dtype: torch.dtype, group_size: int, bits: int
) -> None:
    assert_multiplies(kernels, random_codes(20, 520, group_size, bits=bits), dtype, 5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_zero_points_minima_and_factors_are_applied(
    kernels: Kernels, dtype: torch.dtype, bits: int, stored: torch.dtype
) -> None:
    table = SIGNED_NIBBLES if bits == 4 else SIGNED_BYTES
    codes = random_codes(37, 160, 32, bits=bits, table=table, scale=plain(37, 5, stored))
    for other in (
        dataclasses.replace(codes, zero=zeros(37, 5)),
        dataclasses.replace(codes, minimum=plain(37, 5, stored)),
        dataclasses.replace(codes, zero=zeros(37, 5), minimum=plain(37, 5, stored), factor=1 / 127),
    ):
        assert_multiplies(kernels, other, dtype, 3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 3, 37])
def test_rows_may_have_their_scales_in_common(kernels: Kernels, dtype: torch.dtype, count: int, bits: int) -> None:
    codes = random_codes(37, 160, 32, bits=bits, scale=shared(37, 5, count))
    assert_multiplies(kernels, codes, dtype, 3)
    assert_multiplies(kernels, dataclasses.replace(codes, minimum=shared(37, 5, count)), dtype, 40)


@pytest.mark.parametrize("block_size", [None, 8, 12, 256])
def test_scales_and_minima_may_be_coded_themselves(
    kernels: Kernels, dtype: torch.dtype, block_size: int | None
) -> None:
    codes = random_codes(37, 160, 32, scale=coded(37, 5, block_size))
    assert_multiplies(kernels, codes, dtype, 3)
    assert_multiplies(kernels, dataclasses.replace(codes, minimum=coded(37, 5, block_size)), dtype, 40)


def test_columns_may_be_sorted_by_their_groups(kernels: Kernels, dtype: torch.dtype) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2))
    codes = random_codes(20, 96, 32)
    matrix = codes.decode()
    moved = dataclasses.replace(codes, order=order)
    assert torch.equal(moved.decode()[:, order], matrix)
    assert_multiplies(kernels, moved, dtype, 4)


@pytest.mark.parametrize(("bits", "table"), [(4, NUMBERS), (8, SIGNED_BYTES), (8, FLOAT8)], ids=["4", "8", "float8"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 1000])
def test_a_row_of_a_deterministic_product_with_codes_does_not_depend_on_the_others(
    deterministic_kernels: Kernels, dtype: torch.dtype, bits: int, table: Tensor, group_size: int
) -> None:
    codes = random_codes(90, 320, group_size, bits=bits, table=table)
    groups = -(-320 // group_size)
    codes = dataclasses.replace(codes, zero=zeros(90, groups), minimum=plain(90, groups))
    matrix, x = packed(deterministic_kernels, codes, dtype), inputs(300, 320, dtype)
    together = matrix.linear(x, None)
    for start, stop in ((0, 1), (5, 6), (3, 8), (0, 32), (0, 33), (16, 70), (255, 300)):
        assert torch.equal(matrix.linear(x[start:stop], None), together[start:stop])


def test_codes_take_inputs_with_a_stride(kernels: Kernels, dtype: torch.dtype) -> None:
    matrix, wide = packed(kernels, random_codes(20, 64, 32), dtype), inputs(5, 100, dtype)
    assert torch.equal(matrix.linear(wide[:, 7:71], None), matrix.linear(wide[:, 7:71].contiguous(), None))


def test_a_row_that_is_not_a_number_leaves_the_others_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    matrix, x = packed(kernels, random_codes(20, 80, 16), dtype), inputs(3, 80, dtype)
    broken = x.clone()
    broken[1] = torch.nan
    out, expected = matrix.linear(broken, None), matrix.linear(x, None)
    assert torch.equal(out[::2], expected[::2])
    assert out[1].isnan().all()


def test_codes_the_library_cannot_read_are_left_alone(kernels: Kernels) -> None:
    codes = random_codes(20, 64, 32)
    assert pack(kernels, codes, torch.float16) is None
    assert pack(kernels, random_codes(20, 64, 12), torch.float32) is None
    assert pack(kernels, dataclasses.replace(codes, zero=zeros(20, 2) - 200), torch.float32) is None


def test_packed_codes_take_little_more_than_their_bits(kernels: Kernels) -> None:
    four_bits, eight_bits = random_codes(64, 1024, 64), random_codes(64, 1024, 1024, bits=8)
    assert packed(kernels, four_bits, torch.bfloat16).num_bytes <= 0.57 * 64 * 1024
    assert packed(kernels, eight_bits, torch.bfloat16).num_bytes <= 1.02 * 64 * 1024
