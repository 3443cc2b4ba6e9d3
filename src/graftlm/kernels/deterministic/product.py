"""Matrix products in tiles of fixed shape."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlm.kernels.reference.precision import widened

# Rows computed at once, padded with zeros. A result in a product of fixed shape depends on neither its place among the
# rows nor on what the others hold.
TILE_ROWS = 16
# Terms summed at once. The libraries behind torch cut longer sums up, and where depends on the number of threads.
SUM_TERMS = 256
# Columns of the result computed at once, to bound what a 16-bit matrix takes in float32: 16 MB.
_TILE_COLUMNS = 1 << 14


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix in float32 (float64 stays).

    Args: x: [T, in]. matrix: [in, out], any strides.
    Returns: [T, out], not rounded.
    """
    num_rows, num_terms = x.shape
    num_tiles = -(-num_rows // TILE_ROWS)
    exact = widened(x)
    rows = exact.new_zeros(num_tiles * TILE_ROWS, num_terms)
    rows[:num_rows] = exact
    out = rows.new_zeros(num_tiles * TILE_ROWS, matrix.shape[1])
    for column in range(0, matrix.shape[1], _TILE_COLUMNS):
        columns = slice(column, column + _TILE_COLUMNS)
        for term in range(0, num_terms, SUM_TERMS):
            terms = slice(term, term + SUM_TERMS)
            block = matrix[terms, columns].to(rows.dtype)
            for row in range(0, len(rows), TILE_ROWS):
                out[row : row + TILE_ROWS, columns].addmm_(rows[row : row + TILE_ROWS, terms], block)
    return out[:num_rows]


def batched_product(x: Tensor, matrices: Tensor) -> Tensor:
    """x[b] @ matrices[b]. The number of rows is the caller's to fix; that of products may vary.

    Args: x: [B, M, in], contiguous. matrices: [B, in, out], contiguous or the transpose of what is; one dtype.
    """
    out = torch.bmm(x[:, :, :SUM_TERMS], matrices[:, :SUM_TERMS])
    for start in range(SUM_TERMS, x.shape[2], SUM_TERMS):
        out += torch.bmm(x[:, :, start : start + SUM_TERMS], matrices[:, start : start + SUM_TERMS])
    return out
