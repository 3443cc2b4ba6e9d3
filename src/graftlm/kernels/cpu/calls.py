"""What the wrappers of all C++ functions need: dtype codes, addresses, and which tensors they take."""

from __future__ import annotations

import torch
from torch import Tensor

# As csrc/graft.h counts them.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def takes(*tensors: Tensor) -> bool:
    """Whether all tensors are on the CPU, of one dtype that the library knows, and need no gradient."""
    dtype = tensors[0].dtype
    if dtype not in DTYPE_CODES:
        return False
    # A loop, not `all`: this is asked some hundred times a step.
    for tensor in tensors:  # noqa: SIM110
        if tensor.dtype != dtype or tensor.requires_grad or not tensor.is_cpu:
            return False
    return True


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
