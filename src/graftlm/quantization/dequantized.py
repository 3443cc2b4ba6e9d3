"""Quantised matrices by way of their full-precision form, a slab of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graftlm.kernels import ops
from graftlm.quantization.weight import Weight

# Elements dequantised at once: 16 MB in float32, so that the copy does not outgrow what quantising saved.
SLAB_ELEMENTS = 1 << 22
# Slabs begin where a panel of packed rows may.
SLAB_ROWS = 16

# Inputs [T, in] and a bias [out] or None -> x @ W.T + bias, [T, out].
Product = Callable[[Tensor, Tensor | None], Tensor]
# Outputs' gradients [T, out] -> those of the inputs, y @ W, [T, in].
TurnedProduct = Callable[[Tensor], Tensor]


def dequantized_matmul(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    """x @ W.T + bias, as `Weight.matmul`: what every format can do. Differentiable in x.

    x: [T, in] -> [T, out].
    """
    return frozen_matmul(x, bias, partial(_matmul, weight), partial(dequantized_turned_matmul, weight))


def dequantized_turned_matmul(weight: Weight, y: Tensor) -> Tensor:
    """y @ W, summed over slabs in float32. y: [T, out] -> [T, in]."""
    total = torch.zeros(y.shape[0], weight.shape[1], dtype=ops.widened(y[:0]).dtype, device=y.device)
    for start, stop in _slabs(weight):
        total += y[:, start:stop] @ weight.part(start, stop).dequantize().to(y.dtype)
    return total.to(y.dtype)


def frozen_matmul(x: Tensor, bias: Tensor | None, product: Product, turned: TurnedProduct) -> Tensor:
    """`product(x, bias)`, differentiable in x by `turned`: neither keeps anything of the matrix for the other.

    Source: QLoRA, arXiv 2305.14314.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _FrozenMatmul.apply(x, bias, product, turned)  # type: ignore[no-untyped-call]
        return out
    return product(x, bias)


def _matmul(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    slabs = [
        ops.linear(x, weight.part(start, stop).dequantize(), None if bias is None else bias[start:stop])
        for start, stop in _slabs(weight)
    ]
    return slabs[0] if len(slabs) == 1 else torch.cat(slabs, dim=1)


def _slabs(weight: Weight) -> list[tuple[int, int]]:
    """Rows that are dequantised at once."""
    out_features, in_features = weight.shape
    step = max(1, SLAB_ELEMENTS // in_features)
    return [(start, min(start + step, out_features)) for start in range(0, out_features, step)]


class _FrozenMatmul(torch.autograd.Function):
    """Torch would keep the full-precision matrix until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: Product, turned: TurnedProduct) -> Tensor:
        ctx.turned = turned
        return product(x, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.turned(*gradients), None, None, None


def decode_in_slabs(
    decode: Callable[[int, int], Tensor], *, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A matrix [rows, columns] from a function that makes its rows [start, stop), in any dtype."""
    num_rows, num_columns = shape
    step = max(1, SLAB_ELEMENTS // num_columns)
    if step > SLAB_ROWS:
        step -= step % SLAB_ROWS
    matrix = torch.empty(shape, dtype=dtype, device=device)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        matrix[start:stop] = decode(start, stop)
    return matrix
