"""The deterministic operations give a row the same bits with any rows beside it and with one thread or two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from graftlm.kernels import ops
from graftlm.kernels.registry import DETERMINISTIC, REFERENCE, Kernels, using

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (in, out): odd ones, few outputs of long sums as LoRA's shrink has, and sums of just one term.
SHAPES = [(64, 96), (33, 7), (513, 31), (2048, 16), (4097, 5), (1, 1), (3, 600), (576, 1536)]
SPANS = [(0, 37), (0, 1), (3, 5), (5, 20), (15, 17), (36, 37)]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "cos": torch.cos,
    "power": lambda x: x.abs() ** 1.37,
}


@pytest.fixture(autouse=True)
def implementation() -> Iterator[Kernels]:
    """In the place of every implementation in turn."""
    with using(DETERMINISTIC):
        yield DETERMINISTIC


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rows_stand_alone(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """x: [37, ...]."""
    before = torch.get_num_threads()
    expected = operation(x)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for start, stop in SPANS:
                assert torch.equal(operation(x[start:stop]), expected[start:stop]), (threads, start, stop)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    terms, columns = shape
    weight, bias = draw(columns, terms, dtype=dtype), draw(columns, dtype=dtype)
    assert_rows_stand_alone(lambda x: ops.linear(x, weight, bias), draw(37, terms, dtype=dtype))


def test_products_are_torchs_but_for_rounding() -> None:
    x, weight, bias = draw(37, 513), draw(70, 513), draw(70)
    ours = ops.linear(x, weight, bias)
    torch.testing.assert_close(ours, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_a_sum_of_16_bit_numbers_is_rounded_once() -> None:
    x, weight = draw(37, 600, dtype=torch.bfloat16), draw(70, 600, dtype=torch.bfloat16)
    ours = ops.linear(x, weight)
    exact = functional.linear(x.double(), weight.double())
    # Half a step of a number with 8 bits, and float32's own error.
    assert ((ours.double() - exact).abs() <= exact.abs() / 256 + 1e-4).all()


@pytest.mark.parametrize("num_matrices", [1, 5])
@pytest.mark.parametrize("size", [4, 33, 300])
def test_rows_of_a_grouped_product(num_matrices: int, size: int) -> None:
    matrices = draw(num_matrices, size, size)
    assert_rows_stand_alone(lambda x: ops.grouped_matmul(x, matrices), draw(37, 5, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_low_rank_update(dtype: torch.dtype) -> None:
    expand = ops.LoraExpand(matrix=draw(7, 80), out_start=10, out_stop=90, rank_start=0, rank_stop=7)
    update = ops.LoraUpdate(shrink=draw(300, 7), expands=(expand,))

    def updated(x: Tensor) -> Tensor:
        out = x[:, :100].clone()
        ops.lora(out, x, [ops.LoraSegment(0, len(x), update)])
        return out

    assert_rows_stand_alone(updated, draw(37, 300, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("width", [1, 31, 1500])
def test_elements(function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> None:
    assert_rows_stand_alone(lambda x: ops.elementwise(function, x), draw(37, width, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 31, 1500])
def test_rows_of_norms_and_routing(width: int, dtype: torch.dtype) -> None:
    x, weight = draw(37, width, dtype=dtype), draw(width, dtype=dtype)
    assert_rows_stand_alone(lambda x: ops.rms_norm(x, weight, 1e-6), x)
    assert_rows_stand_alone(lambda x: ops.layer_norm(x, weight, weight, 1e-5), x)
    assert_rows_stand_alone(lambda x: ops.route(x, 2, renormalise=True)[0], x)


def test_torchs_own_product_depends_on_the_rows_beside() -> None:
    weight = draw(96, 4096)
    with using(REFERENCE), pytest.raises(AssertionError):
        assert_rows_stand_alone(lambda x: ops.linear(x, weight), draw(37, 4096))
