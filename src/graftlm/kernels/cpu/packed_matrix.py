"""A weight matrix in the order in which the C++ product reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels.cpu.call_log import empty
from graftlm.kernels.cpu.calls import DTYPE_CODES, address
from graftlm.kernels.cpu.library import Library


class PackedMatrix:
    """A matrix [out, in], float32 or bfloat16, packed in panels of 16 rows (`csrc/linear.cpp`).

    Every element of a product is summed in one order: a row's result does not depend on the other rows, nor on the
    number of threads.
    """

    def __init__(self, library: Library, matrix: Tensor) -> None:
        """matrix: [out, in], contiguous, on the CPU; not kept."""
        rows, columns = matrix.shape
        self.shape = (rows, columns)
        self.dtype = matrix.dtype
        self._library = library
        self._code = DTYPE_CODES[matrix.dtype]
        self._packed = torch.empty(library.packed_size(self._code, rows, columns), dtype=matrix.dtype)
        library.advise_huge_pages(self._packed.data_ptr(), self._packed.nbytes)
        library.pack(self._packed.data_ptr(), matrix.data_ptr(), self._code, rows, columns, torch.get_num_threads())

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W.T + bias, summed in float32 and rounded once. x: [T, in], bias: [out], in the matrix's dtype."""
        rows, columns = self.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        out = empty((x.shape[0], rows), x.dtype)
        self._library.linear(
            out.data_ptr(),
            x.data_ptr(),
            self._packed.data_ptr(),
            address(bias),
            self._code,
            x.shape[0],
            rows,
            columns,
            x.stride(0),
            rows,
            torch.get_num_threads(),
        )
        return out

    def turned_linear(self, y: Tensor) -> Tensor:
        """y @ W, summed in float32 and rounded once. y: [T, out], in the matrix's dtype -> [T, in]."""
        rows, columns = self.shape
        if y.stride(1) != 1:
            y = y.contiguous()
        out = torch.empty((y.shape[0], columns), dtype=y.dtype)
        self._library.turned_linear(
            out.data_ptr(),
            y.data_ptr(),
            self._packed.data_ptr(),
            self._code,
            y.shape[0],
            rows,
            columns,
            y.stride(0),
            columns,
            torch.get_num_threads(),
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """The matrix's own rows. ids: int64 [T], each below the number of rows -> [T, in]."""
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.shape[1]), dtype=self.dtype)
        self._library.unpack_rows(
            out.data_ptr(),
            self._packed.data_ptr(),
            ids.data_ptr(),
            self._code,
            len(ids),
            self.shape[1],
            torch.get_num_threads(),
        )
        return out
