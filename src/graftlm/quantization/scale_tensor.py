"""Scales as they are stored, laid over the matrix they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.quantization.column_groups import ColumnGroups
from graftlm.quantization.disagreements import Disagreements
from graftlm.quantization.scale_grid import ScaleGrid
from graftlm.quantization.stored_module import StoredModule

# uint8 are the exponents of float8_e8m0fnu, from libraries that save them as plain bytes.
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)


def read_scale_grid(
    module: StoredModule,
    role: str,
    *,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    parts: Sequence[int],
    disagreements: Disagreements,
) -> ScaleGrid:
    """The scales of a matrix: one, one per row, per group of a row's columns, per block, or per fused part.

    Args:
        role: the tensor of the scales.
        shape: of the matrix.
        block: rows and columns per scale, the config's; None where it is silent.
        parts: rows of each matrix that was fused into this one; empty where none were.

    Raises:
        CheckpointError: the scales fit none of these.
    """
    scale = module.read(role, dtypes=SCALE_DTYPES)
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    rows, columns = shape
    device = scale.device
    if scale.numel() == 1:
        return _grid(scale.reshape(1, 1), torch.zeros(rows, dtype=torch.int32, device=device), columns, columns)
    if block is not None and tuple(scale.shape) == (-(-rows // block[0]), -(-columns // block[1])):
        return _grid(scale, torch.arange(rows, dtype=torch.int32, device=device) // block[0], columns, block[1])
    by_row = torch.arange(rows, dtype=torch.int32, device=device)
    if tuple(scale.shape) in ((rows,), (rows, 1)):
        _tell(module, block, (1, columns), disagreements)
        return _grid(scale.reshape(rows, 1), by_row, columns, columns)
    if scale.ndim == 2 and scale.shape[0] == rows and scale.shape[1] and columns % scale.shape[1] == 0:
        size = columns // scale.shape[1]
        _tell(module, block, (1, size), disagreements)
        return _grid(scale, by_row, columns, size)
    if scale.numel() == len(parts) == scale.shape[0] and sum(parts) == rows:
        part_of_row = torch.arange(len(parts), dtype=torch.int32).repeat_interleave(torch.tensor(parts))
        return _grid(scale.reshape(-1, 1), part_of_row.to(device), columns, columns)
    raise module.misshapen(role, _allowed(shape, block, parts))


def _grid(scale: Tensor, row_groups: Tensor, columns: int, size: int) -> ScaleGrid:
    return ScaleGrid(scale=scale, row_groups=row_groups, columns=ColumnGroups(columns=columns, size=size))


def _tell(
    module: StoredModule, block: tuple[int, int] | None, stored: tuple[int, int], disagreements: Disagreements
) -> None:
    if block is not None and block != stored:
        disagreements.tell("the size of a scale's block", module.path, config=list(block), tensors=list(stored))


def _allowed(shape: tuple[int, int], block: tuple[int, int] | None, parts: Sequence[int]) -> str:
    rows, columns = shape
    fitting = ["[1]", f"[{rows}, 1]", f"[{rows}, a divisor of {columns}]"]
    if block is not None:
        fitting.append(f"{[-(-rows // block[0]), -(-columns // block[1])]} for blocks of {list(block)}")
    if parts:
        fitting.append(f"[{len(parts)}] for fused parts of {', '.join(map(str, parts))} rows")
    return " or ".join(fitting)
