"""Norms, activations and rotary positions in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.kernels.cpu.call_log import empty
from graftlm.kernels.cpu.calls import DTYPE_CODES, address, takes
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.reference.activation import Activation

_ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu": 2}


class ElementwiseKernels:
    """Operations in which every row is by itself. The methods do what `ops` says under their names.

    rest: does what the library does not take.
    """

    def __init__(self, library: Library, rest: Kernels) -> None:
        self._library = library
        self._rest = rest

    def add(self, branch: Tensor, residual: Tensor) -> Tensor:
        if not _takes_sum(branch, residual):
            return self._rest.add(branch, residual)
        self._library.add(
            branch.data_ptr(),
            residual.data_ptr(),
            DTYPE_CODES[branch.dtype],
            branch.numel(),
            torch.get_num_threads(),
        )
        return branch

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        first = parts[0]
        if not takes(*parts) or any(part.stride(1) != 1 for part in parts):
            return self._rest.join_columns(parts)
        out = empty((first.shape[0], sum(part.shape[1] for part in parts)), first.dtype)
        start = 0
        for part in parts:
            rows, columns = part.shape
            self._library.copy_columns(
                out.data_ptr() + start * out.itemsize,
                part.data_ptr(),
                out.itemsize,
                rows,
                columns,
                part.stride(0),
                out.shape[1],
                torch.get_num_threads(),
            )
            start += columns
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if not takes(x) or not _takes_gain(weight) or not _has_whole_rows(x):
            return self._rest.rms_norm(x, weight, eps)
        *rows, columns = x.shape
        out = empty(x.shape, x.dtype)
        self._library.rms_norm(
            out.data_ptr(),
            x.data_ptr(),
            address(weight),
            DTYPE_CODES[x.dtype],
            0 if weight is None else DTYPE_CODES[weight.dtype],
            rows[0] if rows else 1,
            math.prod(rows[1:]),
            columns,
            x.stride(0),
            eps,
            torch.get_num_threads(),
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        if not takes(x, *(tensor for tensor in (weight, bias) if tensor is not None)) or not x.is_contiguous():
            return self._rest.layer_norm(x, weight, bias, eps)
        out = empty(x.shape, x.dtype)
        columns = x.shape[-1]
        self._library.layer_norm(
            out.data_ptr(),
            x.data_ptr(),
            address(weight),
            address(bias),
            DTYPE_CODES[x.dtype],
            x.numel() // columns,
            columns,
            eps,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(
        self, branch: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not _takes_sum(branch, residual) or not _takes_gain(weight):
            return self._rest.add_rms_norm(branch, residual, weight, eps)
        out = empty(branch.shape, branch.dtype)
        columns = branch.shape[-1]
        self._library.add_rms_norm(
            out.data_ptr(),
            branch.data_ptr(),
            residual.data_ptr(),
            address(weight),
            DTYPE_CODES[branch.dtype],
            0 if weight is None else DTYPE_CODES[weight.dtype],
            branch.numel() // columns,
            columns,
            eps,
            torch.get_num_threads(),
        )
        return branch, out

    def add_layer_norm(
        self, branch: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        weights = (tensor for tensor in (weight, bias) if tensor is not None)
        if not _takes_sum(branch, residual) or not takes(branch, *weights):
            return self._rest.add_layer_norm(branch, residual, weight, bias, eps)
        out = empty(branch.shape, branch.dtype)
        columns = branch.shape[-1]
        self._library.add_layer_norm(
            out.data_ptr(),
            branch.data_ptr(),
            residual.data_ptr(),
            address(weight),
            address(bias),
            DTYPE_CODES[branch.dtype],
            branch.numel() // columns,
            columns,
            eps,
            torch.get_num_threads(),
        )
        return branch, out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if not takes(x) or not x.is_contiguous() or activation not in _ACTIVATION_CODES:
            return self._rest.activate(x, activation)
        self._library.activate(
            x.data_ptr(),
            x.data_ptr(),
            DTYPE_CODES[x.dtype],
            _ACTIVATION_CODES[activation],
            x.numel(),
            torch.get_num_threads(),
        )
        return x

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if not takes(gate_up) or not gate_up.is_contiguous() or activation not in _ACTIVATION_CODES:
            return self._rest.gated_activation(gate_up, activation)
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = empty((rows, columns), gate_up.dtype)
        self._library.gated_activation(
            out.data_ptr(),
            gate_up.data_ptr(),
            DTYPE_CODES[gate_up.dtype],
            _ACTIVATION_CODES[activation],
            rows,
            columns,
            torch.get_num_threads(),
        )
        return out

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not takes(x, cos, sin) or x.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
            return self._rest.apply_rotary(x, cos, sin)
        tokens, heads, head_dim = x.shape
        out = empty((tokens, heads, head_dim), x.dtype)
        self._library.apply_rotary(
            out.data_ptr(),
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            DTYPE_CODES[x.dtype],
            tokens,
            heads,
            head_dim,
            cos.shape[-1],
            x.stride(0),
            x.stride(1),
            torch.get_num_threads(),
        )
        return out


def _takes_sum(branch: Tensor, residual: Tensor) -> bool:
    return (
        takes(branch, residual)
        and branch.shape == residual.shape
        and branch.is_contiguous()
        and residual.is_contiguous()
    )


def _has_whole_rows(x: Tensor) -> bool:
    """Whether x[t] is contiguous for each t, which may lie apart."""
    return x.is_contiguous() or x[0].is_contiguous()


def _takes_gain(weight: Tensor | None) -> bool:
    """Of an RMS norm, in a dtype of its own."""
    return weight is None or takes(weight)
