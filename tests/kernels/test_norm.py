"""Norms against transformers, torch and the formula in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graftlm.kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def random_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows from very small to large, and a weight that is not one."""
    torch.manual_seed(0)
    x = torch.randn(40, 64) * torch.logspace(-4, 3, 40)[:, None]
    return x.to(dtype), (torch.randn(64) + 1).to(dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_rms_norm_matches_the_formula(eps: float) -> None:
    x, weight = random_rows(torch.float32)
    exact = x.double() / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, eps).double(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    x, weight = random_rows(dtype)
    reference = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data.copy_(weight)
    with torch.no_grad():
        expected = reference(x)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    # Same casts in the same places: a half-precision result may differ by one unit in the last place, here and there.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, atol=0, rtol=2 * unit)
    assert (got == expected).double().mean() > (0.3 if dtype == torch.float32 else 0.99)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float32_weight_is_applied_before_rounding(dtype: torch.dtype) -> None:
    x, weight = random_rows(dtype)
    reference = GemmaRMSNorm(64, eps=1e-5).to(dtype)
    reference.weight.data.copy_(weight)
    with torch.no_grad():
        expected = reference(x)
    got = ops.rms_norm(x, weight.float() + 1, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=0, rtol=2 * torch.finfo(dtype).eps)


def test_a_norm_without_weight_only_normalises() -> None:
    x, _ = random_rows(torch.float32)
    assert torch.equal(ops.rms_norm(x, None, 1e-5), ops.rms_norm(x, torch.ones(64), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight = random_rows(dtype)
    exact = torch.nn.functional.layer_norm(x.double(), (64,), weight.double(), weight.double() * 2, 1e-5)
    got = ops.layer_norm(x, weight, weight * 2, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=1e-5 if dtype == torch.float32 else 6e-2, rtol=1e-2)


def test_the_input_is_left_alone() -> None:
    x, weight = random_rows(torch.float32)
    before = x.clone(), weight.clone()
    ops.rms_norm(x, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])
