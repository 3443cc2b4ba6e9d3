"""Eight-bit weights times eight-bit inputs, against the compressed-tensors library on the same tensors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor

from graftlm.errors import CheckpointError
from graftlm.quantization.format import Quantizer
from graftlm.quantization.methods import read_quantization_config
from graftlm.quantization.row_weight import RowWeight
from graftlm.quantization.w8a8_quantizer import W8A8Quantizer
from graftlm.quantization.w8a8_weight import W8A8Weight
from tests.quantization.memory_tensors import MemoryTensors

PATH = "model.layers.0.mlp.up_proj"
CPU = torch.device("cpu")
ROWS, COLUMNS = SHAPE = (48, 200)
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
TOKEN = {**STATIC, "strategy": "token", "dynamic": True}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(largest_input: float = 3.0, dtype: torch.dtype = torch.float32) -> W8A8Weight:
    quantizer: Quantizer = W8A8Quantizer(largest_input=largest_input)
    weight = quantizer.quantize(random(*SHAPE).to(dtype), dtype=dtype)
    assert isinstance(weight, W8A8Weight)
    return weight


def config(inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    settings = W8A8Quantizer.quantization_config(skipped_modules=["lm_head"])
    group = settings["config_groups"]["group_0"]
    group["input_activations"] = inputs
    group["weights"] |= weights
    return settings


def read(tensors: dict[str, Tensor], settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> RowWeight:
    stored = MemoryTensors({f"{PATH}.{role}": tensor for role, tensor in tensors.items()})
    weight = read_quantization_config(settings).read(stored, PATH, shape=SHAPE, dtype=dtype, device=CPU)
    assert isinstance(weight, RowWeight)
    return weight


def test_a_static_scale_rounds_inputs_as_the_library_does() -> None:
    x = random(9, COLUMNS, seed=1) * 2
    weight = read(quantized().stored_tensors(), config(STATIC))
    scale = weight.stored_tensors()["input_scale"] if isinstance(weight, W8A8Weight) else torch.empty(0)
    rounded = fake_quantize(x, scale, torch.zeros(1), QuantizationArgs(**STATIC))
    assert (x.abs() > 3).any()
    assert (rounded - x).abs().max() > 1e-2
    torch.testing.assert_close(weight.matmul(x), rounded @ weight.dequantize().t(), rtol=1e-5, atol=1e-5)


def test_a_scale_per_token_is_the_librarys() -> None:
    x = random(9, COLUMNS, seed=1) * torch.logspace(-3, 3, 9)[:, None]
    x[4] = 0
    args = QuantizationArgs(**TOKEN)
    scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Linear(COLUMNS, ROWS))
    expected = fake_quantize(x[None], scale, zero, args)[0]
    weight = read(quantized().stored_tensors(), config(TOKEN))
    reference = expected @ weight.dequantize().t()
    torch.testing.assert_close(weight.matmul(x), reference, rtol=1e-5, atol=1e-5 * float(reference.abs().max()))
    assert (weight.matmul(x)[4] == 0).all()


@pytest.mark.parametrize("inputs", [STATIC, TOKEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_nothing_but_itself(inputs: dict[str, Any], dtype: torch.dtype) -> None:
    x, bias = random(33, COLUMNS, seed=2).to(dtype), random(ROWS, seed=3).to(dtype)
    x[7] *= 1000
    weight = read(quantized(dtype=dtype).stored_tensors(), config(inputs), dtype)
    together = weight.matmul(x, bias)
    assert together.dtype == dtype
    for row in range(len(x)):
        assert torch.equal(together[row : row + 1], weight.matmul(x[row : row + 1], bias))
    assert torch.equal(together[:, 5:40], weight.part(5, 40).matmul(x, bias[5:40]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_read_back_bit_for_bit(dtype: torch.dtype) -> None:
    stored = quantized(dtype=dtype).stored_tensors()
    again = read(stored, W8A8Quantizer.quantization_config(skipped_modules=[]), dtype)
    assert isinstance(again, W8A8Weight)
    assert again.stored_tensors().keys() == stored.keys() == {"weight", "weight_scale", "input_scale"}
    assert all(torch.equal(tensor, again.stored_tensors()[role]) for role, tensor in stored.items())
    assert again.num_bytes == ROWS * COLUMNS + (ROWS + 1) * dtype.itemsize


def test_no_weight_is_further_off_than_half_a_step_and_zeros_stay_zeros() -> None:
    matrix = random(*SHAPE)
    matrix[3] = 0
    weight = W8A8Quantizer(largest_input=0.0).quantize(matrix, dtype=torch.float32)
    off = (weight.dequantize() - matrix).abs()
    assert (off <= matrix.abs().amax(1, keepdim=True) / 127 / 2 * (1 + 1e-5)).all()
    assert weight.matmul(torch.zeros(2, COLUMNS)).eq(0).all()


def test_the_librarys_scheme_accepts_the_config() -> None:
    group = W8A8Quantizer.quantization_config(skipped_modules=[])["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    assert scheme.input_activations is not None
    assert not scheme.input_activations.dynamic


@pytest.mark.parametrize("inputs", [STATIC, TOKEN])
def test_an_input_that_is_no_number_gives_none(inputs: dict[str, Any]) -> None:
    x = random(3, COLUMNS)
    x[1, 5] = torch.nan
    out = read(quantized().stored_tensors(), config(inputs)).matmul(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_the_gradient_is_that_of_the_dequantised_weights() -> None:
    x = random(4, COLUMNS, seed=5).requires_grad_()
    weight = read(quantized().stored_tensors(), config(STATIC))
    gradient = random(4, ROWS, seed=6)
    out = weight.matmul(x)
    out.backward(gradient)
    with torch.no_grad():
        assert torch.equal(out, weight.matmul(x))
    torch.testing.assert_close(x.grad, gradient @ weight.dequantize())


@pytest.mark.parametrize(
    ("inputs", "weights"),
    [
        (None, {}),
        ({**STATIC, "num_bits": 4}, {}),
        ({**STATIC, "type": "float"}, {}),
        ({**STATIC, "symmetric": False}, {}),
        ({**STATIC, "strategy": "token"}, {}),
        ({**TOKEN, "strategy": "group", "group_size": 8}, {}),
        (STATIC, {"symmetric": False}),
    ],
)
def test_other_inputs_stay_as_they_are_and_it_is_said(
    inputs: dict[str, Any] | None, weights: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tensors = quantized().stored_tensors()
    if weights:
        tensors["weight_zero_point"] = torch.zeros(ROWS, 1, dtype=torch.int8)
    with caplog.at_level(logging.INFO):
        weight = read(tensors, config(inputs, **weights))
    assert ["activations are ignored" in record.getMessage() for record in caplog.records] == [True] * bool(inputs)
    x = random(5, COLUMNS)
    torch.testing.assert_close(weight.matmul(x), x @ weight.dequantize().t())


def test_weights_with_zero_points_are_not_multiplied_as_integers(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {**quantized().stored_tensors(), "weight_zero_point": torch.zeros(ROWS, 1, dtype=torch.int8)}
    assert isinstance(read(tensors, config(STATIC)), W8A8Weight)
    assert not caplog.records
    tensors["weight_zero_point"][3] = 2
    weight = read(tensors, config(STATIC))
    assert not isinstance(weight, W8A8Weight)
    assert "input_activations = int8" in caplog.text


@pytest.mark.parametrize("value", [[0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 1.0]])
def test_a_scale_of_inputs_that_is_none_is_named(value: list[float]) -> None:
    tensors = {**quantized().stored_tensors(), "input_scale": torch.tensor(value)}
    with pytest.raises(CheckpointError, match=r"up_proj\.input_scale "):
        read(tensors, config(STATIC))


def test_a_missing_scale_and_a_shifted_input_are_named() -> None:
    tensors = quantized().stored_tensors()
    shifted = {**tensors, "input_zero_point": torch.ones(1, dtype=torch.int8)}
    with pytest.raises(CheckpointError, match=r"up_proj\.input_zero_point"):
        read(shifted, config(STATIC))
    read({**tensors, "input_zero_point": torch.zeros(1, dtype=torch.int8)}, config(STATIC))
    del tensors["input_scale"]
    with pytest.raises(CheckpointError, match=r"up_proj\.input_scale is missing"):
        read(tensors, config(STATIC))
