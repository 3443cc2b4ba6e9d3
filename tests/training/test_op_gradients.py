"""Gradients of what the layers compute with, against finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.layers.head import OutputHead
from graftlm.layers.transforms import Affine
from graftlm.quantization import DenseWeight
from graftlm.quantization.bitsandbytes.four_bit_quantizer import FourBitQuantizer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend(window: int | None, scores: ops.AttentionScores) -> Callable[..., Tensor]:
    """Two sequences, one with a single token; two query heads to each of two key heads."""
    plan = ops.plan_packed_attention((1, 4), window=window, device=torch.device("cpu"))
    return lambda query, key, value: ops.packed_attention(query, key, value, plan, scores)


def scaled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    out = x * 2
    Affine(scale=scale, shift=shift).apply(out)
    return out


ANGLES = random(5, 1, 2, seed=9)
QKV = ((5, 4, 4), (5, 2, 4), (5, 2, 4))
CAPPED = OutputHead(DenseWeight(random(7, 4, seed=8)), softcap=2.0)
# What is computed -> shapes of its inputs.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (lambda x, weight: ops.rms_norm(x, weight, 1e-5), ((3, 6), (6,))),
    "layer_norm": (lambda x, weight, bias: ops.layer_norm(x, weight, bias, 1e-5), ((3, 6), (6,), (6,))),
    "rotary": (lambda x: ops.apply_rotary(x, ANGLES.cos(), ANGLES.sin()), ((5, 2, 6),)),
    "silu": (lambda x: ops.gated_activation(x, "silu"), ((3, 8),)),
    "gelu": (lambda x: ops.gated_activation(x, "gelu"), ((3, 8),)),
    "gelu_tanh": (lambda x: ops.activate(x, "gelu_tanh"), ((3, 8),)),
    "clamped_swiglu": (lambda x: ops.clamped_swiglu(x, alpha=1.7, limit=0.9), ((3, 8),)),
    "grouped_matmul": (ops.grouped_matmul, ((3, 2, 4), (2, 4, 4))),
    "attention": (attend(None, ops.AttentionScores(scale=0.5)), QKV),
    "window": (attend(2, ops.AttentionScores(scale=0.5)), QKV),
    "capped": (attend(None, ops.AttentionScores(scale=0.5, softcap=1.5)), QKV),
    "slopes": (attend(None, ops.AttentionScores(scale=0.5, slopes=random(4, seed=7))), QKV),
    "sinks": (attend(2, ops.AttentionScores(scale=0.5, sinks=random(4, seed=6))), QKV),
    "capped_head": (lambda x: CAPPED(x, []), ((3, 4),)),
    "scaled_output": (scaled, ((3, 4), (4,), (4,))),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_passes_gradcheck(name: str) -> None:
    function, shapes = CASES[name]
    inputs = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(function, inputs)


def test_the_product_with_a_four_bit_matrix_passes_gradcheck() -> None:
    weight = FourBitQuantizer(quant_type="nf4").quantize(random(6, 64).float(), dtype=torch.float64)
    bias = random(6, seed=1)
    x = random(3, 64, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: weight.matmul(x, bias), [x])
