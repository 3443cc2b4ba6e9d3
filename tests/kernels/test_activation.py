"""Activations against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_first_half_gates_the_second(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(9, 24) * 4).to(dtype)
    gate, up = gate_up.double()[:, :12], gate_up.double()[:, 12:]
    expected = gate / (1 + torch.exp(-gate)) * up
    got = ops.gated_activation(gate_up.clone(), "silu")
    assert got.shape == (9, 12)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_match_their_formulas(name: ops.Activation) -> None:
    x = torch.linspace(-6, 6, 101)
    exact = x.double()
    expected = {
        "silu": exact / (1 + torch.exp(-exact)),
        "gelu": exact * 0.5 * (1 + torch.erf(exact / 2**0.5)),
        "gelu_tanh": 0.5 * exact * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3))),
        "relu": exact.clamp(min=0),
    }[name]
    torch.testing.assert_close(ops.activate(x.clone(), name).double(), expected, atol=1e-6, rtol=1e-5)


def test_extreme_gates_do_not_overflow() -> None:
    got = ops.gated_activation(torch.tensor([[-1e4, 0.0, 1e4, 2.0, 2.0, 2.0]]), "silu")
    assert got.tolist() == [[0.0, 0.0, 2e4]]
