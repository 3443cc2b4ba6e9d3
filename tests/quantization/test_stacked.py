"""Weights of several formats, one under the other, are one weight."""

from __future__ import annotations

import pytest
import torch

from graftlm.quantization import DenseWeight, StackedWeight, Weight
from graftlm.quantization.bitsandbytes import QUANTIZERS

COLUMNS = 24
ROWS = (5, 3, 8)


@pytest.fixture
def parts() -> list[Weight]:
    matrices = [torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)) for rows in ROWS]
    return [
        QUANTIZERS["nf4"].quantize(matrices[0], dtype=torch.float32),
        DenseWeight(matrices[1]),
        QUANTIZERS["int8"].quantize(matrices[2], dtype=torch.float32),
    ]


@pytest.fixture
def matrix(parts: list[Weight]) -> torch.Tensor:
    return torch.cat([part.dequantize() for part in parts])


def test_a_stack_is_the_matrix_of_its_parts(parts: list[Weight], matrix: torch.Tensor) -> None:
    stack = StackedWeight(parts)
    assert stack.shape == (16, COLUMNS)
    assert stack.num_bytes == sum(part.num_bytes for part in parts)
    assert stack.format == "nf4, blocks of 64 and float32 and int8, by row"
    assert torch.equal(stack.dequantize(), matrix)
    x, bias = torch.randn(4, COLUMNS), torch.randn(16)
    torch.testing.assert_close(stack.matmul(x), x @ matrix.T)
    torch.testing.assert_close(stack.matmul(x, bias), x @ matrix.T + bias)
    assert stack.matmul(x[:0]).shape == (0, 16)


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (0, 5), (5, 8), (9, 12), (2, 4), (4, 6), (3, 16), (7, 9)])
def test_a_part_of_a_stack_has_the_rows_between_its_bounds(
    parts: list[Weight], matrix: torch.Tensor, start: int, stop: int
) -> None:
    part = StackedWeight(parts).part(start, stop)
    assert part.shape == (stop - start, COLUMNS)
    assert torch.equal(part.dequantize(), matrix[start:stop])
    x = torch.randn(3, COLUMNS)
    torch.testing.assert_close(part.matmul(x), x @ matrix[start:stop].T)


def test_rows_come_in_the_order_that_is_asked_for(parts: list[Weight], matrix: torch.Tensor) -> None:
    ids = torch.tensor([15, 0, 7, 4, 5, 5, 12])
    assert torch.equal(StackedWeight(parts).rows(ids), matrix[ids])
    assert StackedWeight(parts).rows(ids[:0]).shape == (0, COLUMNS)


@pytest.mark.parametrize("outside", [-1, 16])
def test_rows_outside_the_stack_are_refused(parts: list[Weight], outside: int) -> None:
    with pytest.raises(IndexError):
        StackedWeight(parts).rows(torch.tensor([0, outside]))
