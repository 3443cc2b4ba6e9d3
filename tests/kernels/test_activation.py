"""The gated activation against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels import ops


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_first_half_gates_the_second(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(9, 24) * 4).to(dtype)
    gate, up = gate_up.double()[:, :12], gate_up.double()[:, 12:]
    expected = gate / (1 + torch.exp(-gate)) * up
    got = ops.gated_activation(gate_up.clone())
    assert got.shape == (9, 12)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_extreme_gates_do_not_overflow() -> None:
    got = ops.gated_activation(torch.tensor([[-1e4, 0.0, 1e4, 2.0, 2.0, 2.0]]))
    assert got.tolist() == [[0.0, 0.0, 2e4]]
