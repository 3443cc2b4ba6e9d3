"""Products of eight-bit integers are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.kernels.reference.integer_product import by_exact_floats

WAYS = [ops.integer_matmul, by_exact_floats]


@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [(1, 1, 1), (3, 70, 33), (17, 4097, 8), (0, 64, 5), (5, 64, 1)]
)
def test_every_sum_is_the_one_of_64_bit_integers(
    product: Callable[[Tensor, Tensor], Tensor], rows: int, columns: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-128, 128, (count, columns), dtype=torch.int8, generator=generator) for count in (rows, outputs)
    )
    out = product(x, weight)
    assert out.dtype == torch.int32
    assert torch.equal(out.long(), x.long() @ weight.long().t())


@pytest.mark.parametrize("product", WAYS)
def test_the_largest_sum_an_int32_holds_is_exact(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    extreme = torch.full((1, ops.MAX_INTEGER_COLUMNS), -128, dtype=torch.int8)
    assert product(extreme, extreme).item() == ops.MAX_INTEGER_COLUMNS * 128 * 128
