"""A matrix of small integer codes in the order in which the C++ product reads it."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.kernels.cpu.call_log import empty
from graftlm.kernels.cpu.calls import DTYPE_CODES, address
from graftlm.kernels.cpu.library import Library
from graftlm.kernels.grouped_codes import SIGNED_BYTES, CodedValues, GroupedCodes, GroupValues, PlainValues

PANEL_ROWS = 16
# Groups begin where the eight columns do that lie together.
COLUMNS_TOGETHER = 8


class _Values(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("row_groups", ctypes.c_void_p),
        ("skip", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("offset", ctypes.c_float),
        ("type", ctypes.c_int32),
    ]


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("scale", _Values),
        ("minimum", _Values),
        ("factor", ctypes.c_float),
        ("bits", ctypes.c_int32),
        ("by_row", ctypes.c_int32),
    ]


# How csrc's `Values` counts numbers that lie in panels.
_PLAIN_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CODED_TYPE, _SHARED_TYPE = 3, 4


def takes_codes(codes: GroupedCodes) -> bool:
    """Whether the library can multiply with such a matrix."""
    rows, columns = codes.codes.shape
    return (
        codes.codes.device.type == "cpu"
        and rows > 0
        and (codes.group_size % COLUMNS_TOGETHER == 0 or codes.group_size >= columns)
        and (codes.zero is None or bool(((codes.zero >= -128) & (codes.zero < 128)).all()))
    )


class CodedMatrix:
    """A matrix [out, in] of four-bit or eight-bit codes, packed in panels of 16 rows (`csrc/coded_linear.cpp`).

    With few rows scales are applied to sums over their groups; with many, or small groups, to what is summed. A row's
    result does not depend on the other rows but for that, nor on the number of threads.
    """

    def __init__(self, library: Library, codes: GroupedCodes, dtype: torch.dtype, *, by_row: bool) -> None:
        """codes: such as `takes_codes` agrees to; its codes and values are not kept. dtype: of inputs and results.
        by_row: a row's result must not depend on how many there are either."""
        rows, columns = codes.codes.shape
        self.shape = (rows, columns)
        self.dtype = dtype
        self._library = library
        # Integers of eight bits need no table; the library reads them as signed.
        is_signed = codes.bits == 8 and torch.equal(codes.table, SIGNED_BYTES)
        self._packed = torch.empty(library.packed_code_bytes(codes.bits, rows, columns), dtype=torch.uint8)
        library.advise_huge_pages(self._packed.data_ptr(), self._packed.nbytes)
        unpacked = (codes.codes ^ 128 if is_signed else codes.codes).contiguous()
        library.pack_codes(
            self._packed.data_ptr(), unpacked.data_ptr(), codes.bits, rows, columns, torch.get_num_threads()
        )
        self._scale = _packed_values(codes.scale)
        self._minimum = None if codes.minimum is None else _packed_values(codes.minimum)
        self._zero = None if codes.zero is None else _in_panels(codes.zero.to(torch.int8))
        self._table = None if is_signed else _copied(codes.table)
        self._order = codes.order
        self._matrix = _Matrix(
            rows=rows,
            columns=columns,
            group_size=codes.group_size,
            codes=self._packed.data_ptr(),
            table=address(self._table),
            zero=address(self._zero),
            scale=_values_structure(self._scale),
            minimum=_Values() if self._minimum is None else _values_structure(self._minimum),
            factor=codes.factor,
            bits=codes.bits,
            by_row=by_row,
        )

    @property
    def num_bytes(self) -> int:
        values = sum(values.num_bytes for values in (self._scale, self._minimum) if values is not None)
        tensors = (self._packed, self._table, self._zero, self._order)
        return values + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W.T + bias, summed in float32 and rounded once. x: [T, in], bias: [out], in the matrix's dtype.

        In bfloat16 what is summed is rounded to it: what the codes stand for, or that times its scale as in `rows`.
        """
        if self._order is not None:
            x = x.index_select(1, self._order)
        elif x.stride(1) != 1:
            x = x.contiguous()
        out = empty((x.shape[0], self.shape[0]), x.dtype)
        self._library.coded_linear(
            out.data_ptr(),
            x.data_ptr(),
            ctypes.addressof(self._matrix),
            address(bias),
            DTYPE_CODES[self.dtype],
            x.shape[0],
            x.stride(0),
            self.shape[0],
            torch.get_num_threads(),
        )
        return out

    def turned_linear(self, y: Tensor) -> Tensor:
        """y @ W for the W that `rows` gives, summed in float32 and rounded once. y: [T, out], in the matrix's dtype
        -> [T, in]."""
        if y.stride(1) != 1:
            y = y.contiguous()
        out = torch.empty((y.shape[0], self.shape[1]), dtype=y.dtype)
        self._library.turned_coded_linear(
            out.data_ptr(),
            y.data_ptr(),
            ctypes.addressof(self._matrix),
            DTYPE_CODES[self.dtype],
            y.shape[0],
            y.stride(0),
            self.shape[1],
            torch.get_num_threads(),
        )
        return self._in_order(out)

    def rows(self, ids: Tensor) -> Tensor:
        """The matrix's rows, to the bit what the codes it was packed from stand for. ids: int64 [T], each below the
        number of rows -> [T, in]."""
        ids = ids.contiguous()
        out = torch.empty((len(ids), self.shape[1]), dtype=self.dtype)
        self._library.decode_rows(
            out.data_ptr(),
            ctypes.addressof(self._matrix),
            ids.data_ptr(),
            DTYPE_CODES[self.dtype],
            len(ids),
            torch.get_num_threads(),
        )
        return self._in_order(out)

    def _in_order(self, matrix: Tensor) -> Tensor:
        """Columns where they belong. matrix: [T, in], columns in the order of the codes."""
        return matrix if self._order is None else torch.empty_like(matrix).index_copy_(1, self._order, matrix)


def _in_panels(values: Tensor) -> Tensor:
    """[out, groups] -> [ceil(out / 16), groups, 16], the last rows zeros."""
    rows, groups = values.shape
    padded = functional.pad(values, (0, 0, 0, -rows % PANEL_ROWS))
    return _copied(padded.view(-1, PANEL_ROWS, groups).transpose(1, 2))


def _copied(tensor: Tensor) -> Tensor:
    """Contiguous, and never a view: of what a file maps, one small tensor would keep the whole in the process."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _packed_values(values: GroupValues) -> GroupValues:
    """The same in panels, but for those that rows have in common, and of a dtype that the library reads."""
    if isinstance(values, CodedValues):
        table, factors = _copied(values.table), _copied(values.factors)
        return replace(values, codes=_in_panels(values.codes), table=table, factors=factors)
    stored = values.stored
    if values.row_groups is not None:
        return PlainValues(stored=_copied(stored.float()), row_groups=_copied(values.row_groups.int()))
    # The library widens float16 as if all were finite.
    is_kept = stored.dtype in _PLAIN_TYPES and (stored.dtype != torch.float16 or bool(stored.isfinite().all()))
    return PlainValues(stored=_in_panels(stored if is_kept else stored.float()))


def _values_structure(values: GroupValues) -> _Values:
    if isinstance(values, CodedValues):
        return _Values(
            data=values.codes.data_ptr(),
            table=values.table.data_ptr(),
            factors=values.factors.data_ptr(),
            skip=values.skip,
            block_size=values.block_size or 1 << 62,
            offset=values.offset,
            type=_CODED_TYPE,
        )
    if values.row_groups is not None:
        return _Values(data=values.stored.data_ptr(), row_groups=values.row_groups.data_ptr(), type=_SHARED_TYPE)
    return _Values(data=values.stored.data_ptr(), type=_PLAIN_TYPES[values.stored.dtype])
