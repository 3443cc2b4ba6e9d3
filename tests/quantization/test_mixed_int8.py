"""LLM.int8()'s own arithmetic, on request."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import pytest
import torch
from torch import Tensor

from graftlm import LLM
from graftlm.errors import ConfigurationError
from graftlm.quantization.bitsandbytes import QUANTIZERS
from graftlm.quantization.bitsandbytes.mixed_int8_weight import with_outliers

PROMPT = [3, 14, 15, 92, 65]


def inputs(rows: int, outliers: bool, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    if outliers:
        x[0, 5], x[-1, 40] = 9.0, -30.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("outliers", [False, True])
def test_products_are_those_of_bitsandbytes(rows: int, outliers: bool, dtype: torch.dtype) -> None:
    matrix, x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).half(), inputs(rows, outliers, dtype)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(2)).to(dtype)
    layer = bitsandbytes.nn.Linear8bitLt(64, 48, has_fp16_weights=False, threshold=6.0)
    layer.weight = bitsandbytes.nn.Int8Params(matrix.clone(), requires_grad=False, has_fp16_weights=False)
    layer.bias = torch.nn.Parameter(bias.clone())
    layer = layer.to("cpu").eval()
    weight = with_outliers(QUANTIZERS["int8"].quantize(matrix, dtype=dtype), 6.0)
    with torch.no_grad():
        expected = layer(x.clone())
    # bitsandbytes' CPU code scales by 6.200124e-05, which is 2e-5 more than 1 / 127^2, the number of its GPU code.
    tolerance = 3e-5 if dtype == torch.float32 else 1e-2
    assert (weight.matmul(x, bias) - expected).abs().max() <= tolerance * (1 + expected.abs().max())


def test_a_neighbours_outlier_changes_a_row_and_without_the_option_it_does_not() -> None:
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    plain = QUANTIZERS["int8"].quantize(matrix, dtype=torch.float32)
    mixed = with_outliers(plain, 6.0)
    x = inputs(7, outliers=True, dtype=torch.float32)
    for weight, is_independent in ((plain, True), (mixed, False)):
        alone, together = weight.matmul(x[3:4])[0], weight.matmul(x)[3]
        assert torch.allclose(alone, together, rtol=1e-6, atol=1e-5) == is_independent


def test_gradients_flow_as_through_the_dequantised_weight() -> None:
    weight = with_outliers(QUANTIZERS["int8"].quantize(torch.randn(8, 64), dtype=torch.float32), 6.0)
    x = torch.randn(3, 64, requires_grad=True)
    weight.matmul(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(3, -1))


def test_a_model_is_served_so_when_it_is_asked_for(llama: Path) -> None:
    plain = LLM(llama, quantization="int8").logits(PROMPT)
    mixed = LLM(llama, quantization="int8", int8_threshold=6.0).logits(PROMPT)
    difference = (plain - mixed).abs().max()
    assert 0 < difference < 0.1 * plain.abs().max()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "about int8 weights"),
        ({"quantization": "nf4"}, "about int8 weights"),
        ({"quantization": "int8", "deterministic": True}, "deterministic promises"),
        ({"quantization": "int8", "int8_threshold": -1.0}, "no magnitude"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(llama: Path, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        LLM(llama, **{"int8_threshold": 6.0, **options})  # type: ignore[arg-type]
