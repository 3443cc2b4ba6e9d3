"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def angles_of(positions: Tensor, half: int) -> Tensor:
    return positions.double()[:, None, None] / 10_000.0 ** (torch.arange(half).double() / half)


def by_complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("heads", [1, 5])
def test_heads_are_turned_by_the_angle_of_their_position(heads: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 511, 4095, 17, 17])
    x = torch.randn(len(positions), heads, 16).to(dtype)
    before = x.clone()
    angles = angles_of(positions, 8)
    got = ops.apply_rotary(x, angles.cos().to(dtype), angles.sin().to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_complex_numbers(x, angles), atol=tolerance, rtol=tolerance)
    assert torch.equal(x, before)


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 3, 8)
    assert torch.equal(ops.apply_rotary(x, torch.ones(1, 1, 4), torch.zeros(1, 1, 4)), x)


def test_dimensions_beyond_the_rotated_ones_are_copied() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 3, 20)
    angles = angles_of(torch.arange(5) * 7, 4)
    got = ops.apply_rotary(x, angles.cos().float(), angles.sin().float())
    torch.testing.assert_close(got[..., :8].double(), by_complex_numbers(x[..., :8], angles), atol=1e-6, rtol=1e-5)
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_heads_of_a_fused_projection_are_read_in_place() -> None:
    torch.manual_seed(1)
    fused = torch.randn(4, 10, 8)
    angles = angles_of(torch.arange(4), 4)
    got = ops.apply_rotary(fused[:, 2:7], angles.cos().float(), angles.sin().float())
    torch.testing.assert_close(got.double(), by_complex_numbers(fused[:, 2:7], angles), atol=1e-6, rtol=1e-5)
